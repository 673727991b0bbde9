#include "ops/common/out.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "ops/common/checks.h"
#include "ops/common/shapes.h"

namespace scaledot {
namespace {

// Where the bytes of a tensor lie: dimensions of more than one element, with strides in bytes. The last is the bytes of
// an element.
struct Bytes {
  uintptr_t first;
  std::vector<std::pair<int64_t, int64_t>> dims;  // size, stride

  explicit Bytes(const Tensor& tensor) : first(reinterpret_cast<uintptr_t>(tensor.const_data_ptr())) {
    const int64_t bytes = tensor.element_size();
    for (int64_t d = 0; d < tensor.dim(); ++d)
      if (tensor.size(d) > 1) dims.emplace_back(tensor.size(d), tensor.stride(d) * bytes);
    if (bytes > 1) dims.emplace_back(bytes, 1);
  }
  // From the first byte to the last, along the dimensions with strides below `limit`.
  int64_t span(int64_t limit) const {
    int64_t bytes = 0;
    for (const auto& [size, stride] : dims)
      if (stride < limit) bytes += (size - 1) * stride;
    return bytes;
  }
  // Whether the other dimensions only move by multiples of `period`.
  bool repeats(int64_t period) const {
    return std::all_of(dims.begin(), dims.end(),
                       [&](const auto& dim) { return dim.second < period || dim.second % period == 0; });
  }
};

// Whether the two lie in different places of every period of this length: as queries and outputs of one projection do.
bool apart_in(int64_t period, const Bytes& a, const Bytes& b) {
  if (period <= 1 || !a.repeats(period) || !b.repeats(period)) return false;
  const int64_t between = int64_t(b.first % uintptr_t(period)) - int64_t(a.first % uintptr_t(period));
  const int64_t start = between < 0 ? between + period : between;  // of b, if a starts at 0
  return start > a.span(period) && start + b.span(period) < period;
}

bool may_overlap(const Tensor& one, const Tensor& other) {
  if (one.numel() == 0 || other.numel() == 0 || one.device() != other.device() || one.is_meta()) return false;
  const Bytes a(one), b(other);
  if (a.first + uintptr_t(a.span(INT64_MAX)) < b.first || b.first + uintptr_t(b.span(INT64_MAX)) < a.first)
    return false;
  const auto apart = [&](const auto& dim) { return apart_in(dim.second, a, b); };
  return !std::any_of(a.dims.begin(), a.dims.end(), apart) && !std::any_of(b.dims.begin(), b.dims.end(), apart);
}

// Whether each stride passes over all that the smaller ones reach.
bool may_overlap_itself(const Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += (size - 1) * stride;
  }
  return false;
}

}  // namespace

template <class Int>
void check_out(const Tensor& out, const c10::SmallVector<Int, 5>& shape, const Tensor& query) {
  check_result<Int>(&out, "out", shape, query.scalar_type(), query);
  const auto strides = out.sym_strides();
  bool repeats = false, contiguous = true;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] <= 1) continue;
    repeats = repeats || strides[d] == 0;
    if (d + 1 == shape.size()) contiguous = strides[d] == 1;
  }
  if constexpr (std::is_same_v<Int, int64_t>) repeats = repeats || (out.numel() > 0 && may_overlap_itself(out));
  TORCH_CHECK_VALUE(!repeats, "out: got strides ", shape_text<c10::SymInt>(strides), " for shape ", shape_of(out),
                    "; needs a place in memory for each element");
  TORCH_CHECK_VALUE(contiguous, "out: got strides ", shape_text<c10::SymInt>(strides), "; needs a last stride of 1");
}

void check_out_apart(const Tensor& out, const Tensor& tensor, const char* argument) {
  TORCH_CHECK_VALUE(!may_overlap(out, tensor), "out: got a tensor that shares memory with ", argument,
                    "; needs memory of its own");
}

void check_out_needs_no_grad(const Tensor& tensor, const char* argument) {
  const bool grad = at::GradMode::is_enabled() && requires_grad(tensor);
  if (!grad && !has_tangent(tensor)) return;
  const bool is_out = argument == std::string_view("out");
  TORCH_CHECK_VALUE(false, "out: got a tensor ", is_out ? "that" : "while ", is_out ? "" : argument,
                    grad ? " requires grad" : " has a tangent",
                    "; needs torch.no_grad() or torch.inference_mode(), or None, as such a call has no derivative");
}

template void check_out(const Tensor&, const c10::SmallVector<int64_t, 5>&, const Tensor&);
template void check_out(const Tensor&, const c10::SmallVector<c10::SymInt, 5>&, const Tensor&);

}  // namespace scaledot
