// A tensor of a test: values with any strides in a buffer whose other elements are poison. A kernel that reads outside
// of its tensor reads NaN; intact() detects writes.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "reference.h"

namespace scaledot::testing {

// The order of the last three dimensions (head, row, col) in memory. blhd: (row, head, col), as projections produce it.
// inner2: every second element. transposed: (head, col, row). padded: a gap after each row. aligned: contiguous, with
// the first element on a vector boundary. aligned_blhd: (row, head, col), aligned too.
enum class MemoryOrder { contiguous, padded, blhd, inner2, transposed, aligned, aligned_blhd };

// Dimensions with stride 0: one element stands for all.
struct Broadcast {
  bool batch = false, head = false, row = false, col = false;
};

// The numbers of a dtype of 8 bits in order, each with its bits. Without NaN and -0.
class QuantisedNumbers {
 public:
  explicit QuantisedNumbers(DType dtype) {
    std::vector<std::pair<double, uint8_t>> list;
    for (int bits = 0; bits < 256; ++bits) {
      alignas(double) const uint8_t one[sizeof(double)] = {uint8_t(bits)};
      const double x = load_stored_element<double>(one, dtype, 0);
      if (!std::isnan(x) && !(x == 0 && bits > 0)) list.push_back({x, uint8_t(bits)});
    }
    std::sort(list.begin(), list.end());
    numbers_.fill(std::numeric_limits<double>::infinity());
    for (count_ = 0; count_ < list.size(); ++count_)
      numbers_[count_] = list[count_].first, bits_[count_] = list[count_].second;
  }

  // The bits of the nearest number. NaN: one that has no place in a result, where there is no NaN.
  uint8_t nearest(double x) const {
    constexpr uint8_t kNaN = 0x7f;
    if (std::isnan(x)) return kNaN;
    size_t above = 0;  // how many numbers are less than x; without branches, which could not be predicted
    for (size_t step = 128; step > 0; step /= 2) above += numbers_[above + step - 1] < x ? step : 0;
    if (above == 0) return bits_[0];
    if (above >= count_) return bits_[count_ - 1];
    const bool takes_above = numbers_[above] == x || numbers_[above] - x < x - numbers_[above - 1];
    return bits_[takes_above ? above : above - 1];
  }

 private:
  std::array<double, 256> numbers_;
  std::array<uint8_t, 256> bits_ = {};
  size_t count_ = 0;
};
inline const QuantisedNumbers& quantised_numbers(DType dtype) {
  static const QuantisedNumbers int8(DType::int8), e4m3(DType::float8_e4m3fn), e5m2(DType::float8_e5m2);
  return dtype == DType::int8 ? int8 : dtype == DType::float8_e4m3fn ? e4m3 : e5m2;
}

class TestTensor {
 public:
  TestTensor() = default;

  TestTensor(DType dtype, std::vector<int64_t> batch_sizes, int64_t heads, int64_t rows, int64_t cols,
             MemoryOrder order = MemoryOrder::contiguous, Broadcast broadcast = {})
      : dtype_(dtype),
        batch_sizes_(std::move(batch_sizes)),
        heads_(broadcast.head ? 1 : heads),
        rows_(broadcast.row ? 1 : rows),
        cols_(broadcast.col ? 1 : cols) {
    if (broadcast.batch) std::fill(batch_sizes_.begin(), batch_sizes_.end(), 1);
    view_.dtype = dtype;
    int64_t step = order == MemoryOrder::inner2 ? 2 : 1;
    const auto lay = [&step](int64_t& stride, int64_t size, bool is_broadcast, int64_t gap = 0) {
      stride = is_broadcast ? 0 : step;
      if (!is_broadcast) step = step * size + gap;
    };
    const bool aligned = order == MemoryOrder::aligned || order == MemoryOrder::aligned_blhd;
    const int64_t gap = order == MemoryOrder::contiguous || aligned ? 0 : 3;
    guard_ = aligned ? kAlignedGuard : kGuard;
    switch (order) {
      case MemoryOrder::transposed:
        lay(view_.row_stride, rows_, broadcast.row, gap);
        lay(view_.col_stride, cols_, broadcast.col);
        lay(view_.head_stride, heads_, broadcast.head);
        break;
      case MemoryOrder::blhd:
      case MemoryOrder::aligned_blhd:
        lay(view_.col_stride, cols_, broadcast.col, gap);
        lay(view_.head_stride, heads_, broadcast.head);
        lay(view_.row_stride, rows_, broadcast.row);
        break;
      default:
        lay(view_.col_stride, cols_, broadcast.col, gap);
        lay(view_.row_stride, rows_, broadcast.row);
        lay(view_.head_stride, heads_, broadcast.head);
    }
    for (int d = int(batch_sizes_.size()) - 1; d >= 0; --d)
      lay(view_.batch_stride[d], batch_sizes_[d], broadcast.batch);
    allocate();
  }

  // A copy with other strides, the first element `guard` elements after the start of an allocation. If elements
  // overlap, the last value of each counts. Strides of broadcast dimensions have to stay 0.
  TestTensor with_strides(const TensorView& strides, int64_t guard) const {
    TestTensor result = *this;
    result.view_ = strides;
    result.view_.dtype = dtype_;
    result.guard_ = guard;
    result.allocate();
    result.set(values());
    return result;
  }

  // A copy in float64, contiguous, with the same broadcast dimensions.
  TestTensor as_float64() const {
    if (!present()) return {};
    const auto same = [](int64_t stride, int64_t size) { return stride == 0 && size == 1; };
    bool batch = !batch_sizes_.empty();
    for (size_t d = 0; d < batch_sizes_.size(); ++d) batch = batch && same(view_.batch_stride[d], batch_sizes_[d]);
    TestTensor result(
        DType::float64, batch_sizes_, heads_, rows_, cols_, MemoryOrder::contiguous,
        {batch, same(view_.head_stride, heads_), same(view_.row_stride, rows_), same(view_.col_stride, cols_)});
    result.set(values());
    return result;
  }

  bool present() const { return dtype_ != DType::none; }
  DType dtype() const { return dtype_; }
  // The number of elements in memory.
  int64_t count() const {
    int64_t n = heads_ * rows_ * cols_;
    for (int64_t size : batch_sizes_) n *= size;
    return n;
  }

  TensorView view() const {
    TensorView result = view_;
    result.data = present() ? const_cast<uint8_t*>(storage_.data()) + guard_ * element_size(dtype_) : nullptr;
    return result;
  }

  // Sizes in memory: 1 along a broadcast dimension.
  const std::vector<int64_t>& batch_sizes() const { return batch_sizes_; }
  int64_t heads() const { return heads_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }

  // Calls body(index in row-major order, offset in memory) for every element in memory.
  template <class Body>
  void for_each(const Body& body) const {
    int64_t batches = 1, logical = 0;
    for (int64_t size : batch_sizes_) batches *= size;
    for (int64_t b = 0; b < batches; ++b) {
      int64_t start = 0, rest = b;
      for (int d = int(batch_sizes_.size()) - 1; d >= 0; --d) {
        start += rest % batch_sizes_[d] * view_.batch_stride[d];
        rest /= batch_sizes_[d];
      }
      for (int64_t h = 0; h < heads_; ++h)
        for (int64_t i = 0; i < rows_; ++i)
          for (int64_t j = 0; j < cols_; ++j)
            body(logical++, start + h * view_.head_stride + i * view_.row_stride + j * view_.col_stride);
    }
  }

  // The values as the kernel sees them: rounded to the dtype.
  std::vector<double> values() const {
    std::vector<double> result(static_cast<size_t>(count()));
    if (!present()) return {};
    const auto load = [&]<class T>(const T* data) {
      for_each([&](int64_t logical, int64_t index) { result[size_t(logical)] = double(widen(data[index])); });
    };
    switch (dtype_) {
      case DType::float32: load(elements<float>()); break;
      case DType::float64: load(elements<double>()); break;
      case DType::bfloat16: load(elements<BFloat16>()); break;
      case DType::float16: load(elements<Float16>()); break;
      default:
        for_each([&](int64_t logical, int64_t index) {
          result[size_t(logical)] = load_stored_element<double>(elements<uint8_t>(), dtype_, index);
        });
    }
    return result;
  }

  void set(const std::vector<double>& values) {
    const auto store = [&]<class T>(T* data) {
      for_each([&](int64_t logical, int64_t index) { narrow(values[size_t(logical)], data[index]); });
    };
    switch (dtype_) {
      case DType::float32: return store(elements<float>());
      case DType::float64: return store(elements<double>());
      case DType::bfloat16: return store(elements<BFloat16>());
      case DType::float16: return store(elements<Float16>());
      case DType::boolean:
        return for_each([&, data = elements<uint8_t>()](int64_t logical, int64_t index) {
          data[index] = uint8_t(values[size_t(logical)] != 0);
        });
      default:
        return for_each(
            [&, data = elements<uint8_t>(), &numbers = quantised_numbers(dtype_)](int64_t logical, int64_t index) {
              data[index] = numbers.nearest(values[size_t(logical)]);
            });
    }
  }

  // Copies rows of a tensor with as many heads and columns, and of this dtype.
  void copy_rows(int64_t to, const TestTensor& source, int64_t from, int64_t rows) {
    const size_t size = size_t(element_size(dtype_));
    const auto element = [size](const TestTensor& t, int64_t head, int64_t row, int64_t col) {
      const TensorView& v = t.view_;
      const int64_t index = t.guard_ + head * v.head_stride + row * v.row_stride + col * v.col_stride;
      return std::ptrdiff_t(size_t(index) * size);
    };
    for (int64_t head = 0; head < heads_; ++head)
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t col = 0; col < cols_; ++col)
          std::copy_n(source.storage_.begin() + element(source, head, from + row, col), size,
                      storage_.begin() + element(*this, head, to + row, col));
  }

  void fill_with_poison() { std::fill(storage_.begin(), storage_.end(), kPoison); }

  // Fills the elements with a large finite number, so that one that is not written differs from every result, NaN too.
  void fill_with_finite() {
    const size_t size = size_t(element_size(dtype_));
    for (size_t index = 0; index < belongs_.size(); ++index)
      if (belongs_[index]) std::fill_n(storage_.begin() + std::ptrdiff_t(index * size), size, kLargeByte);
  }

  // Whether everything around the elements is still poison.
  bool intact() const {
    const size_t size = size_t(element_size(dtype_));
    for (size_t index = 0; index < belongs_.size(); ++index)
      for (size_t byte = 0; byte < size && !belongs_[index]; ++byte)
        if (storage_[index * size + byte] != kPoison) return false;
    return true;
  }

  // All elements, with one NaN instead of every NaN. The bits of a NaN depend on the order of an operation's operands,
  // which compilers choose.
  std::vector<uint8_t> bytes() const {
    if (!present()) return {};
    const std::vector<double> values = this->values();
    std::vector<uint8_t> result = storage_;
    const size_t size = size_t(element_size(dtype_));
    for_each([&](int64_t logical, int64_t index) {
      if (std::isnan(values[size_t(logical)]))
        std::fill_n(result.begin() + std::ptrdiff_t(size_t(index + guard_) * size), size, kPoison);
    });
    return result;
  }

  // Calls body(begin, bytes) for every stretch of memory that belongs to no element.
  template <class Body>
  void for_each_gap(const Body& body) const {
    const size_t size = size_t(element_size(dtype_));
    for (size_t begin = 0, end = 0; begin < belongs_.size(); begin = end + 1) {
      for (end = begin; end < belongs_.size() && !belongs_[end];) ++end;
      if (end > begin) body(storage_.data() + begin * size, (end - begin) * size);
    }
  }

 private:
  static constexpr int64_t kGuard = 67;  // odd, so that the first element is not on a vector boundary
  static constexpr int64_t kAlignedGuard = 64;
  static constexpr uint8_t kPoison = 0xff;  // all ones is NaN in every floating dtype, and "attend" in a boolean mask
  static constexpr uint8_t kLargeByte = 0x7b;  // 0x7b7b... is finite in every floating dtype

  template <class T>
  T* elements() const {
    return static_cast<T*>(view().data);
  }

  // Elements from the first to the last.
  int64_t extent() const {
    if (count() == 0) return 1;
    int64_t last = (heads_ - 1) * view_.head_stride + (rows_ - 1) * view_.row_stride + (cols_ - 1) * view_.col_stride;
    for (size_t d = 0; d < batch_sizes_.size(); ++d) last += (batch_sizes_[d] - 1) * view_.batch_stride[d];
    return last + 1;
  }

  void allocate() {
    const int64_t extent = this->extent();
    const int64_t bytes = (extent + 2 * guard_) * element_size(dtype_);
    storage_.assign(size_t(bytes), kPoison);
    belongs_.assign(size_t(extent + 2 * guard_), 0);
    for_each([&](int64_t, int64_t index) { belongs_[size_t(index + guard_)] = 1; });
  }

  DType dtype_ = DType::none;
  std::vector<int64_t> batch_sizes_;
  int64_t heads_ = 0, rows_ = 0, cols_ = 0, guard_ = kGuard;
  TensorView view_ = {};
  std::vector<uint8_t> storage_;
  std::vector<uint8_t> belongs_;  // 1: to an element
};

}  // namespace scaledot::testing
