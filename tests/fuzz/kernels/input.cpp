#include "input.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <sstream>

namespace scaledot::testing {
namespace {

constexpr size_t kCaseBytes = 48, kLayoutBytes = 4, kLayouts = 7;
static_assert(kMostBytes == kCaseBytes + kLayoutBytes * kLayouts + 1);

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t next() { return at_ < size_ ? data_[at_++] : (++at_, uint8_t(0)); }
  int64_t below(int64_t n) { return next() % n; }
  bool flag() { return next() & 1; }
  template <class T, size_t N>
  T pick(const T (&list)[N]) {
    return list[next() % N];
  }
  void skip_to(size_t at) { at_ = at; }
  size_t left() const { return at_ < size_ ? size_ - at_ : 0; }

 private:
  const uint8_t* data_;
  size_t size_, at_ = 0;
};

// Which sizes are drawn. edges: lengths around those of tiles and chunks, few heads and short rows.
enum class Sizes { small, edges, any };

struct Effort {
  Sizes sizes;
  int64_t work;  // multiply-adds of one input, about
};

// Most problems are small, because thousands run in the time of a large one.
Effort effort_of(uint8_t byte) {
  if (byte < 216) return {Sizes::small, int64_t(1) << 12};
  if (byte < 251) return {Sizes::edges, int64_t(1) << 15};
  return {Sizes::any, int64_t(1) << (byte < 255 ? 16 : 19)};
}

int64_t length_of(uint8_t byte, Sizes sizes) {
  constexpr int64_t kEdges[] = {1,   2,   3,   5,   6,   7,   8,   9,   11,  12,  13,  15,  16,  17,  20,
                                31,  32,  33,  47,  48,  49,  54,  55,  56,  57,  63,  64,  65,  70,  95,
                                96,  97,  111, 112, 113, 127, 128, 129, 130, 140, 144, 145, 191, 193, 255,
                                256, 257, 300, 383, 384, 385, 511, 512, 513, 514, 530, 640};
  constexpr int64_t kLong[] = {256, 257, 300, 383, 512, 513, 640, 1023, 1030, 1100};
  switch (sizes) {
    case Sizes::small: return 1 + byte % 20;
    case Sizes::edges: return kEdges[byte % std::size(kEdges)];
    default: return byte < 200 ? byte + 1 : kLong[(byte - 200) % 10];
  }
}

bool halve(int64_t& number, int64_t least = 1) {
  if (number <= least) return false;
  number = max(number / 2, least);
  return true;
}

int64_t work_of(const Case& c, const std::vector<Lengths>& lengths) {
  int64_t scores = 0, batches = 1;
  for (int64_t size : c.batch) batches *= size;
  for (const Lengths& n : lengths) scores += n.query * n.key;
  return batches * c.heads * scores * max<int64_t>(c.head_dim + c.value_dim, 8);
}

// Makes the problem small enough, starting with the dimensions whose size matters least. `keep_keys`: the queries
// become fewer before the keys do.
void shrink(Case& c, std::vector<Lengths>& lengths, const Effort& effort, bool keep_keys) {
  const int64_t least_dim = effort.sizes == Sizes::edges ? 2 : 24;
  while (work_of(c, lengths) > effort.work) {
    if (c.batch.size() > 1) {
      c.batch.pop_back();
    } else if (!(c.head_dim > least_dim && halve(c.head_dim)) && !(c.value_dim > least_dim && halve(c.value_dim))) {
      if (c.heads > 2 * c.kv_heads) {
        c.heads -= c.kv_heads;
      } else if (c.kv_heads > 1) {
        c.heads = c.heads / c.kv_heads * (c.kv_heads - 1), --c.kv_heads;
      } else {
        Lengths& longest = *std::max_element(lengths.begin(), lengths.end(), [](const Lengths& a, const Lengths& b) {
          return a.query * a.key < b.query * b.key;
        });
        halve(keep_keys ? longest.query : longest.key, 2) || halve(c.head_dim, 2) || halve(c.value_dim, 2) ||
            halve(keep_keys ? longest.key : longest.query, 2);
      }
    }
  }
}

void parse_run(Bytes& bytes, Input& input) {
  const uint8_t kernel = bytes.next(), passes = bytes.next();
  if (kernel < 248) input.kernel = kernel;
  input.forward = passes % 4 != 2, input.backward = passes % 4 != 1;
  input.again = passes / 4 % 4 == 0;
}

void parse_sizes(Bytes& bytes, Case& c, Sizes sizes) {
  const std::vector<int64_t> batches[] = {{1}, {}, {2}, {2, 1}, {1, 2, 2}, {3}, {2, 2}, {4}};
  const bool any = sizes == Sizes::any;
  const int64_t dims = any ? 81 : 21;
  c.dtype = bytes.pick(kDTypes);
  c.query_length = length_of(bytes.next(), sizes), c.key_length = length_of(bytes.next(), sizes);
  c.head_dim = bytes.below(dims);
  const uint8_t value_dim = bytes.next();
  c.value_dim = value_dim < 128 ? value_dim % dims : c.head_dim;
  c.kv_heads = 1 + bytes.below(any ? 3 : 2);
  c.heads = c.kv_heads * (1 + bytes.below(any ? 12 : 5));
  c.batch = batches[bytes.below(8)];
}

void parse_positions(Bytes& bytes, Case& c) {
  const uint8_t flags = bytes.next();
  c.causal = flags & 1, c.lower_right = flags & 2;
  const int64_t left = bytes.next(), right = bytes.next();
  const uint8_t columns = bytes.next();
  if (columns % 4 == 3) c.mask_columns = 1 + 3 * (columns / 4);
  if (flags & 4) c.window_left = left;
  if (flags & 8) c.window_right = right;
}

void parse_scores(Bytes& bytes, Case& c) {
  constexpr double kScales[] = {0, 0.7, -0.4, 1e-46, 1e-39, 1.5}, kCaps[] = {0, 0, 1.5, 0.1, 3, 40};
  constexpr double kSpreads[] = {1, 1, 6, 0.01}, kDrops[] = {0, 0, 0.3, 0.01, 0.5, 0.9, 1.0};
  c.scale = bytes.pick(kScales), c.softcap = bytes.pick(kCaps), c.spread = bytes.pick(kSpreads);
  c.dropout_p = bytes.pick(kDrops);
  c.alibi = AlibiKind(bytes.below(3));
}

void parse_mask(Bytes& bytes, Case& c) {
  constexpr double kMasked[] = {-kInfinity, -kInfinity, -2.5, -1e9, 0, 3, -3.4028234663852886e38};
  constexpr double kOffsets[] = {0, 0, -150};
  c.mask = MaskKind(bytes.below(4));
  const uint8_t broadcast = bytes.next();
  c.mask_broadcast = {bool(broadcast & 1), bool(broadcast & 2), bool(broadcast & 4), bool(broadcast & 8)};
  c.empty_rows = broadcast & 16;
  if (!(broadcast & 32)) c.mask_dtype = kDTypes[broadcast >> 6];
  c.masked_score = bytes.pick(kMasked), c.mask_offset = bytes.pick(kOffsets);
}

void parse_results(Bytes& bytes, Case& c) {
  const uint8_t flags = bytes.next(), special = bytes.next(), other = bytes.next();
  c.return_weights = flags & 1, c.average_weights = c.return_weights && (flags & 128);
  c.grad_output = !(flags & 2), c.grad_lse = !(flags & 4), c.grad_weights = !(flags & 8);
  c.wants_query = !(flags & 16), c.wants_key = !(flags & 32), c.wants_value = !(flags & 64);
  c.nan_in_masked = special & 1, c.nan_in_live_key = special & 2, c.nan_in_live_value = special & 4;
  c.nan_in_live_query = special & 8, c.inf_in_live_key = special & 16;
  c.key_broadcast.batch = special & 32, c.key_broadcast.head = special & 64;
  c.order = MemoryOrder(other % 7);
  c.seed = bytes.next();
}

void parse_part(Bytes& bytes, Case& c) {
  const bool given = bytes.flag();
  const int64_t row = bytes.next(), key = bytes.next(), batch = bytes.below(4), head = bytes.below(4);
  if (given) c.part = {true, row, key, batch, head, c.heads + head};
}

void parse_relative(Bytes& bytes, Case& c) {
  const int64_t kind = bytes.below(8), low = bytes.next(), entries = bytes.next();
  const bool low_entries = bytes.flag();
  // Most are as far apart as the positions of a small problem.
  const auto spread_out = [](int64_t byte) { return byte < 192 ? byte % 64 : 16 * (byte - 192); };
  if (kind < 5) return;
  c.relative = RelativeKind(kind - 4);
  c.relative_range.low = spread_out(low) - (low < 192 ? 48 : 600);
  c.relative_range.high = c.relative_range.low + spread_out(entries);
  if (low_entries) c.relative_low = -kInfinity;
}

void parse_blocks(Bytes& bytes, Case& c) {
  constexpr int64_t kSizes[] = {1, 2, 3, 5, 8, 13, 16, 24, 48, 61, 64, 100, 128, 1000};
  const uint8_t flags = bytes.next();
  const int64_t rows = bytes.pick(kSizes), keys = bytes.pick(kSizes);
  if (flags % 4 != 3) return;
  c.block_rows = rows, c.block_keys = keys;
  c.block_broadcast.batch = flags & 4, c.block_broadcast.head = flags & 8;
}

void parse_cache(Bytes& bytes, Case& c) {
  const std::vector<double> scales[] = {{0.03, -0.2, 1.5}, {1}, {0}, {kNaN, 0.1}, {100, -100}};
  const int64_t kind = bytes.below(8);
  c.scales = scales[bytes.below(std::size(scales))];
  if (kind >= 5) c.cache = kCaches[kind - 5];
}

void parse_last(Bytes& bytes, Input& input) {
  const uint8_t flags = bytes.next();
  Case& c = input.packed.common;
  int64_t batch = 1;
  for (int64_t size : c.batch) batch *= size;
  c.dropout_seeds = flags & 1 ? batch : 1;
  if (!(flags & 2)) return;
  const bool some = (flags & 4) && c.key_length > kSavedTile;
  input.saved_keys = some ? (c.key_length - 1) / kSavedTile * kSavedTile : c.key_length;
}

// What quantised keys and values do not have. `scales` are those of keys in memory.
void leave_out_of_cache(Case& c) {
  if (c.cache == DType::none) return;
  if (c.dtype == DType::float64) c.dtype = DType::float32;
  c.key_broadcast = {};
}

// Leaves out what is no error of a kernel.
void avoid_known_limits(Case& c) {
  // Kernels multiply the score by a k_scale of NaN, also where there is no key element.
  if (c.head_dim == 0 && std::isnan(c.scales[0])) c.cache = DType::none;
  if (c.head_dim == 0) c.nan_in_live_key = c.nan_in_live_query = c.inf_in_live_key = false;
  // Without value columns no gradient reaches the weights: NaN times nothing is 0 or NaN.
  if (c.value_dim == 0) c.nan_in_live_key = c.nan_in_live_value = c.nan_in_live_query = c.inf_in_live_key = false;
  // The gradient of a dropped weight is 0 by the formula, and NaN where it comes from an output that is NaN.
  if (c.dropout_p > 0) c.nan_in_live_value = c.inf_in_live_key = false;
  // A key whose infinity makes the score -inf has a weight of 0: its NaN value times that is 0 or NaN.
  if (c.inf_in_live_key) c.nan_in_live_value = false;
  const bool special = c.nan_in_live_key || c.nan_in_live_value || c.nan_in_live_query || c.inf_in_live_key;
  // A scale that is 0 in float32 makes NaN of inf.
  if (special && c.scale > 0 && c.scale < 1e-30) c.scale = 0;
  // NaN times a gradient that is absent, or that is 0 because masked_score replaced the score: 0 or NaN.
  if (special) c.grad_output = true, c.masked_score = -kInfinity;
  // The backward of a part has nothing but lse, and -1e9 + log(keys) is -1e9 in float32.
  if (c.part.given) c.masked_score = -kInfinity;
}

std::optional<Layout> parse_layout(Bytes& bytes) {
  const uint8_t order = bytes.next(), gaps = bytes.next(), shared = bytes.next(), guard = bytes.next();
  if (!(order & 128)) return std::nullopt;
  Layout layout;
  layout.order = order % 24;
  layout.step = 1 + (order >> 5) % 3;
  for (int d = 0; d < 4; ++d) layout.gaps[d] = (gaps >> (2 * d)) & 3;
  if (shared & 128) layout.shared = shared % 4, layout.shared_stride = (shared >> 2) % 4;
  layout.guard = 1 + guard % 80;
  return layout;
}

void parse_sequences(Bytes& bytes, PackedCase& c, Sizes sizes) {
  constexpr int64_t kPageSizes[] = {1, 2, 3, 5, 8, 16, 64, 100};
  c.page_size = bytes.pick(kPageSizes), c.unused = bytes.below(40);
  const bool seeds = bytes.flag();
  const size_t count = std::clamp<size_t>(bytes.left() / 2, 1, 6);
  for (size_t k = 0; k < count; ++k) {
    const uint8_t rows = bytes.next(), keys = bytes.next();
    c.lengths.push_back({rows ? length_of(rows, sizes) : 0, keys ? length_of(keys, sizes) : 0});
  }
  c.seeds = seeds ? int64_t(count) : 1;
}

// What packed sequences do not have.
void leave_out(Case& c) {
  c.batch = {1}, c.return_weights = c.average_weights = false, c.part = {};
  c.key_broadcast = {}, c.dropout_seeds = 1, c.block_rows = c.block_keys = 0;
  if (c.mask_columns == 0) c.mask = MaskKind::none;
  c.mask_broadcast = {false, c.mask_broadcast.head};
  c.grad_output = c.grad_lse = c.wants_query = c.wants_key = c.wants_value = true;
  if (c.alibi == AlibiKind::heads) c.alibi = AlibiKind::batch_heads;
}

}  // namespace

TestTensor Layout::applied_to(const TestTensor& tensor) const {
  if (!tensor.present()) return tensor;
  std::array<int, 4> dims = {0, 1, 2, 3};  // 0: batch, then as in Broadcast
  for (int k = 0; k < order; ++k) std::next_permutation(dims.begin(), dims.end());
  TensorView view = tensor.view();
  int64_t next = step;
  const auto lay = [&](int64_t& stride, int64_t size, int dim) {
    if (size == 1 && stride == 0) return;  // broadcast
    stride = dim == shared ? shared_stride : next;
    if (dim != shared) next = next * max<int64_t>(size, 1) + gaps[dim];
  };
  const std::vector<int64_t>& batches = tensor.batch_sizes();
  for (int dim : dims) {
    if (dim == 0)
      for (size_t d = batches.size(); d-- > 0;) lay(view.batch_stride[d], batches[d], 0);
    else
      lay(dim == 1   ? view.head_stride
          : dim == 2 ? view.row_stride
                     : view.col_stride,
          dim == 1   ? tensor.heads()
          : dim == 2 ? tensor.rows()
                     : tensor.cols(),
          dim);
  }
  return tensor.with_strides(view, guard);
}

Input parse(const uint8_t* data, size_t size) {
  constexpr Form kForms[] = {Form::dense, Form::dense,  Form::dense, Form::dense,
                             Form::dense, Form::packed, Form::paged, Form::hostile};
  Bytes bytes(data, size);
  Input input;
  Case& c = input.packed.common;
  input.form = bytes.pick(kForms);
  input.workers = 1 + int(bytes.below(5)), input.shuffle = bytes.next();
  const Effort effort = effort_of(bytes.next());
  const bool keep_keys = effort.sizes != Sizes::edges || input.shuffle % 2;
  parse_run(bytes, input);
  parse_sizes(bytes, c, effort.sizes);
  parse_positions(bytes, c);
  parse_scores(bytes, c);
  parse_mask(bytes, c);
  parse_results(bytes, c);
  parse_part(bytes, c);
  parse_relative(bytes, c);
  parse_blocks(bytes, c);
  parse_cache(bytes, c);
  leave_out_of_cache(c);
  avoid_known_limits(c);
  bytes.skip_to(kCaseBytes);
  if (input.form == Form::dense) {
    c.mask_columns = 0;
    for (std::optional<Layout>& layout : input.layouts) layout = parse_layout(bytes);
    // NaN of a masked query, key or value would be that of a live one too, and an element of the mask that of two keys.
    for (int k = 0; k < 4; ++k)
      if (input.layouts[k] && input.layouts[k]->shared >= 0) c.nan_in_masked = false;
    std::vector<Lengths> one = {{c.query_length, c.key_length}};
    shrink(c, one, effort, keep_keys);
    c.query_length = one[0].query, c.key_length = one[0].key;
    bytes.skip_to(kCaseBytes + kLayouts * kLayoutBytes);
    parse_last(bytes, input);
  } else {
    leave_out(c);
    parse_sequences(bytes, input.packed, effort.sizes);
    shrink(c, input.packed.lengths, effort, keep_keys);
    const bool paged = input.form == Form::paged || (input.form == Form::hostile && input.shuffle % 2);
    if (!paged) input.packed.page_size = 0;
  }
  const bool forward_only = c.average_weights || c.cache != DType::none || input.packed.page_size > 0;
  if (forward_only) input.forward = true, input.backward = false, input.saved_keys = 0;
  return input;
}

Built build(const Input& input) {
  Built b = build(input.common());
  if (input.backward) add_gradients(b);
  TestTensor* const tensors[kLayouts] = {&b.query,       &b.key,      &b.value,       &b.attn_mask,
                                         &b.grad_output, &b.grad_lse, &b.grad_weights};
  for (size_t k = 0; k < kLayouts; ++k)
    if (input.layouts[k]) *tensors[k] = input.layouts[k]->applied_to(*tensors[k]);
  return b;
}

std::string describe(const Input& input) {
  constexpr const char* kForms[] = {"dense", "packed", "paged", "hostile"};
  const Case& c = input.common();
  std::ostringstream s;
  s << kForms[int(input.form)] << ' ' << dtype_name(c.dtype) << ", batch";
  for (int64_t size : c.batch) s << ' ' << size;
  s << ", heads " << c.heads << '/' << c.kv_heads << ", length " << c.query_length << 'x' << c.key_length << ", dim "
    << c.head_dim << ' ' << c.value_dim << ", workers " << input.workers << ", shuffle " << input.shuffle;
  for (const Lengths& n : input.packed.lengths) s << ", " << n.query << 'x' << n.key;
  if (input.form != Form::dense)
    s << ", page_size " << input.packed.page_size << ", unused " << input.packed.unused << ", seeds "
      << input.packed.seeds;
  s << "\n  causal " << c.causal << ", lower_right " << c.lower_right << ", window " << c.window_left << ' '
    << c.window_right << ", scale " << c.scale << ", softcap " << c.softcap << ", spread " << c.spread << ", dropout_p "
    << c.dropout_p << " of " << c.dropout_seeds << " seeds, alibi " << int(c.alibi) << "\n  mask " << int(c.mask) << ' '
    << dtype_name(c.mask_dtype) << ", broadcast " << c.mask_broadcast.batch << c.mask_broadcast.head
    << c.mask_broadcast.row << c.mask_broadcast.col << ", columns " << c.mask_columns << ", empty_rows " << c.empty_rows
    << ", masked_score " << c.masked_score << ", offset " << c.mask_offset << "\n  weights " << c.return_weights
    << " average " << c.average_weights << ", grads " << c.grad_output << c.grad_lse << c.grad_weights << ", wants "
    << c.wants_query << c.wants_key << c.wants_value << ", nan masked " << c.nan_in_masked << " key "
    << c.nan_in_live_key << " value " << c.nan_in_live_value << " query " << c.nan_in_live_query << " inf key "
    << c.inf_in_live_key << ", key broadcast " << c.key_broadcast.batch << c.key_broadcast.head << ", order "
    << int(c.order) << ", seed " << c.seed << ", part " << c.part.given << ' ' << c.part.row << ' ' << c.part.key << ' '
    << c.part.batch << ' ' << c.part.head << ' ' << c.part.heads << "\n  kernel " << input.kernel << ", passes "
    << input.forward << input.backward << ", kept keys " << input.saved_keys << ", again " << input.again
    << ", relative " << int(c.relative) << ' ' << c.relative_range.low << ' ' << c.relative_range.high << ' '
    << c.relative_low << ", blocks " << c.block_rows << 'x' << c.block_keys << ' ' << c.block_broadcast.batch
    << c.block_broadcast.head << ", cache " << dtype_name(c.cache) << ", scales";
  for (double scale : c.scales) s << ' ' << scale;
  constexpr const char* kTensors[] = {"query", "key", "value", "attn_mask", "grad_output", "grad_lse", "grad_weights"};
  for (size_t k = 0; k < kLayouts; ++k)
    if (const std::optional<Layout>& l = input.layouts[k])
      s << "\n  " << kTensors[k] << " order " << l->order << ", step " << l->step << ", gaps " << l->gaps[0]
        << l->gaps[1] << l->gaps[2] << l->gaps[3] << ", shared " << l->shared << ' ' << l->shared_stride << ", guard "
        << l->guard;
  return s.str();
}

}  // namespace scaledot::testing
