#include "ops/varlen/kernel_call.h"

#include <limits>
#include <vector>

#include "ops/common/checks.h"
#include "ops/common/out.h"
#include "ops/common/problem_builder.h"
#include "ops/sdpa/saved.h"
#include "ops/varlen/checks.h"

namespace scaledot {
namespace {

// (rows, heads, columns) as the builder takes it.
Tensor heads_first(const Tensor& tensor) { return tensor.transpose(0, 1); }
OptionalTensor heads_first(const OptionalTensor& tensor) {
  const Tensor* given = present(tensor);
  return given ? OptionalTensor(heads_first(*given)) : std::nullopt;
}

// Key or value; of a pool of pages, the first one.
Tensor first_page(const Tensor& tensor, bool paged) {
  if (!paged) return tensor;
  return tensor.size(0) > 0 ? tensor.select(0, 0) : tensor.flatten(0, 1);
}

// The shape in which kernels write the gradient of attn_mask: its own, or with all heads, which are summed afterwards.
VarlenShapes<int64_t>::Vector grad_mask_shape(const Backend& backend, const Tensor& mask,
                                              const VarlenShapes<int64_t>& s) {
  const int64_t own_heads = mask.dim() == 3 ? mask.size(0) : 1;
  return {backend.sums_packed_mask ? own_heads : s.heads, s.total_q, mask.size(-1)};
}

// The inputs in the form that kernels read. The Problem points into them, so they must outlive it. `shape_only`: as in
// ProblemBuilder.
class PackedInputs {
 public:
  PackedInputs(const Backend& backend, const VarlenArgs& args, const VarlenShapes<int64_t>& s, bool shape_only = false)
      : query_(heads_first(args.inputs.query)),
        key_(heads_first(first_page(args.inputs.key, present(args.inputs.block_table)))),
        value_(heads_first(first_page(args.inputs.value, present(args.inputs.block_table)))),
        seed_(shape_only ? OptionalTensor() : backend.seed(args.inputs.dropout_seed, args.inputs.query.device())),
        inputs_{.query = query_,
                .key = key_,
                .value = value_,
                .attn_mask = args.inputs.attn_mask,
                .alibi_slopes = args.inputs.alibi_slopes,
                .relative_bias = args.inputs.relative_bias} {
    const VarlenInputs& in = args.inputs;
    packed_.total_q = s.total_q;
    packed_.total_k = s.total_k;
    packed_.num_splits = args.num_splits ? args.num_splits->expect_int() : 0;
    if (const Tensor* mask = present(in.attn_mask)) packed_.mask_keys = mask->size(-1);
    packed_.lower_right = args.options.causal_alignment == "lower_right";
    int64_t most_keys = s.total_k;
    if (const Tensor* table = present(in.block_table)) {
      pages_.table_stride = pages_.table_length = table->size(1);
      pages_.pool = in.key.size(0);
      pages_.size = in.key.size(1);
      pages_.key_stride = in.key.stride(0);
      pages_.value_stride = in.value.stride(0);
      TORCH_CHECK_VALUE(pages_.table_length <= INT32_MAX / pages_.size, "block_table: got shape ",
                        shape_text<int64_t>(table->sizes()),
                        "; needs room for fewer than 2^31 keys a sequence, with pages of ", pages_.size);
      most_keys = pages_.pool > 0 ? pages_.table_length * pages_.size : 0;
    }
    shapes_.batch = {s.sequences};
    shapes_.heads = s.heads;
    shapes_.kv_heads = s.kv_heads;
    shapes_.query_length = min(args.max_q.expect_int(), s.total_q);
    shapes_.key_length = min(args.max_k.expect_int(), most_keys);
    shapes_.head_dim = s.head_dim;
    shapes_.value_dim = s.value_dim;
    shapes_.has_heads = true;
    if (in.query.is_meta()) {
      take_bounds(s.sequences);
    } else {
      packed_.cu_seq_q = lengths_view(in.cu_seq_q, 0, "cu_seq_q");
      if (const Tensor* cu_seq_k = present(in.cu_seq_k)) packed_.cu_seq_k = lengths_view(*cu_seq_k, 1, "cu_seq_k");
      if (const Tensor* used = present(in.seqused_k)) packed_.seqused_k = lengths_view(*used, 2, "seqused_k");
      if (const Tensor* table = present(in.block_table)) pages_.table = index_view(*table, 3, "block_table");
    }
  }
  PackedInputs(const PackedInputs&) = delete;

  const SdpaInputs& inputs() const { return inputs_; }
  const Shapes<int64_t>& shapes() const { return shapes_; }

  Problem finish(ProblemBuilder& builder) const {
    builder.add_seed(seed_);
    const Problem problem = builder.finish(packed_, pages_);
    // On a GPU, reading the numbers would mean to wait for them.
    if (query_.device().is_cpu()) check_sequences(problem);
    return problem;
  }

 private:
  // explain() reads these tensors too, and checks no other storage.
  IndexView index_view(const Tensor& tensor, int k, const char* name) {
    check_storage(tensor, name);
    indices_[k] = tensor.contiguous();
    return {indices_[k].const_data_ptr(), tensor.scalar_type() == at::kLong};
  }

  // On a CPU a call reads lengths several times, also to allocate memory. Another thread may write to the tensor, so
  // the call reads a copy.
  IndexView lengths_view(const Tensor& tensor, int k, const char* name) {
    IndexView view = index_view(tensor, k, name);
    if (tensor.is_cpu()) view.data = (indices_[k] = indices_[k].clone()).const_data_ptr();
    return view;
  }

  // Meta tensors have no numbers: every sequence is as long as it may be.
  void take_bounds(int64_t sequences) {
    const auto cumulative = [&](std::vector<int64_t>& bounds, int64_t length) {
      for (int64_t b = 0; b <= sequences; ++b) bounds.push_back(b * length);
      return IndexView{bounds.data(), /*wide=*/true};
    };
    packed_.cu_seq_q = cumulative(bounds_q_, shapes_.query_length);
    packed_.total_q = sequences * shapes_.query_length;
    pages_.table_stride = 0;
    if (pages_.size > 0) return;
    packed_.cu_seq_k = cumulative(bounds_k_, shapes_.key_length);
    packed_.total_k = sequences * shapes_.key_length;
  }

  const Tensor query_, key_, value_;
  const OptionalTensor seed_;
  const SdpaInputs inputs_;
  Tensor indices_[4];                         // cu_seq_q, cu_seq_k, seqused_k, block_table
  std::vector<int64_t> bounds_q_, bounds_k_;  // in place of the first two
  Packed packed_{};
  Pages pages_{};
  Shapes<int64_t> shapes_;
};

Tensor empty(const Backend& backend, at::IntArrayRef sizes, at::ScalarType type, c10::Device device) {
  return backend.empty(sizes, row_major_strides(sizes), type, device);
}

// Runs a forward. The last result is undefined unless the call is `recorded`; then that is `args` again. `out`: the
// caller's output, or null.
Tensor3 run_forward(const Backend& backend, const VarlenArgs& args, const VarlenRecordedArgs* recorded,
                    const Tensor* out = nullptr) {
  const VarlenInputs& in = args.inputs;
  const VarlenShapes<int64_t> s = check_varlen<int64_t>(args);
  if (recorded) check_varlen_recorded(*recorded);
  check_storages(in);
  const at::ScalarType type = in.query.scalar_type();
  const c10::Device device = in.query.device();
  if (out) check_out_memory(*out, s.output(), in);
  const PackedInputs packed(backend, args, s);
  const Tensor output = out ? *out : empty(backend, s.output(), type, device);
  const Tensor lse = empty(backend, s.lse(), lse_dtype(type), device);
  const bool saves = recorded && recorded->save_output_low;
  const Tensor saved = saves      ? empty(backend, s.output(), type, device)
                       : recorded ? empty(backend, {0}, type, device)
                                  : Tensor();
  const Tensor output_rows = heads_first(output), saved_rows = saves ? heads_first(saved) : Tensor();

  ProblemBuilder builder(packed.inputs(), args.options, packed.shapes());
  builder.add(&Problem::k_scale, in.k_scale);
  builder.add(&Problem::v_scale, in.v_scale);
  builder.add_written(&Problem::output, output_rows);
  builder.add(&Problem::lse, lse);
  if (saves) builder.add(&Problem::output_low, saved_rows);
  const Problem problem = packed.finish(builder);
  if (has_scores(problem)) {
    backend.run(problem, Pass::forward, device);
  } else {
    output.zero_();
    if (recorded) saved.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
  }
  return {output, lse, saved};
}

}  // namespace

bool saves_output_low(const Backend& backend, const VarlenArgs& args) {
  return may_save_output_low(args.inputs.query.scalar_type()) && !present(args.inputs.block_table) &&
         !is_quantised(args.inputs.key) &&
         (args.max_k.is_symbolic() || args.max_k.expect_int() > backend.keys_without_output_low);
}

Tensor2 run_varlen(const Backend& backend, const VarlenArgs& args) {
  auto [output, lse, saved] = run_forward(backend, args, nullptr);
  return {std::move(output), std::move(lse)};
}

Tensor run_varlen_out(const Backend& backend, const VarlenOutArgs& args) {
  return std::get<1>(run_forward(backend, args.forward(), nullptr, &args.out));
}

Tensor3 run_varlen_recorded(const Backend& backend, const VarlenRecordedArgs& args) {
  return run_forward(backend, args, &args);
}

VarlenGradients run_varlen_backward(const Backend& backend, const VarlenBackwardArgs& args) {
  const VarlenInputs& in = args.inputs;
  const VarlenArgs forward = args.forward();
  const VarlenShapes<int64_t> s = check_varlen<int64_t>(forward);
  check_varlen_backward(args, s);
  check_storages(in);
  const c10::Device device = in.query.device();
  const PackedInputs packed(backend, forward, s);
  const Tensor output_rows = heads_first(args.output);
  const OptionalTensor grad_output_rows = heads_first(args.grad_output), saved_rows = heads_first(args.saved);

  ProblemBuilder builder(packed.inputs(), args.options, packed.shapes());
  builder.add(&Problem::output, output_rows);
  builder.add(&Problem::lse, args.lse);
  builder.add(&Problem::output_low, saved_rows);
  builder.add(&Problem::grad_output, grad_output_rows);
  builder.add(&Problem::grad_lse, args.grad_lse);
  const Tensor* const inputs[] = {&in.query, &in.key, &in.value};
  TensorView Problem::*const fields[] = {&Problem::grad_query, &Problem::grad_key, &Problem::grad_value};
  Tensor gradients[3], rows[3];
  for (int k = 0; k < 3; ++k) {
    gradients[k] = empty(backend, args.output_mask[k] ? inputs[k]->sizes() : at::IntArrayRef{0},
                         args.output.scalar_type(), device);
    if (!args.output_mask[k]) continue;
    rows[k] = heads_first(gradients[k]);
    builder.add(fields[k], rows[k]);
  }
  // Kernels write the entries that some score may read, in the type of sums.
  Tensor grad_relative = empty(backend, args.output_mask[3] ? in.relative_bias->sizes() : at::IntArrayRef{0},
                               lse_dtype(args.output.scalar_type()), device)
                             .zero_();
  if (args.output_mask[3]) builder.add(&Problem::grad_relative_bias, grad_relative);
  const auto mask_shape = args.output_mask[4] ? grad_mask_shape(backend, *in.attn_mask, s) : decltype(s.lse()){0};
  Tensor grad_mask = empty(backend, mask_shape, lse_dtype(args.output.scalar_type()), device).zero_();
  if (args.output_mask[4]) builder.add(&Problem::grad_mask, grad_mask);
  const Problem problem = packed.finish(builder);
  const bool runs = has_scores(problem);
  for (int k = 0; k < 3; ++k)
    if (!runs || (k > 0 && problem.packed.seqused_k.data)) gradients[k].zero_();
  if (runs) backend.run(problem, Pass::backward, device);
  if (args.output_mask[3]) grad_relative = grad_relative.to(in.relative_bias->scalar_type());
  if (const Tensor* mask = present(in.attn_mask); args.output_mask[4]) {
    if (grad_mask.numel() != mask->numel()) grad_mask = grad_mask.sum(0);
    grad_mask = grad_mask.view(mask->sizes()).to(mask->scalar_type());
  }
  return {gradients[0], gradients[1], gradients[2], grad_relative, grad_mask};
}

std::string run_explain_varlen(const Backend& backend, const ExplainVarlenArgs& args) {
  const VarlenInputs& in = args.inputs;
  const VarlenShapes<int64_t> s = check_varlen<int64_t>(args, /*needs_seed=*/false);
  const PackedInputs packed(backend, args, s, /*shape_only=*/true);
  const at::ScalarType type = in.query.scalar_type();
  // The layouts of the tensors that a call would allocate, heads first.
  struct Layout {
    int64_t sizes[3], strides[3];
    Layout(int64_t total, int64_t heads, int64_t cols) : sizes{heads, total, cols}, strides{cols, heads * cols, 1} {}
  };
  const Layout output(s.total_q, s.heads, s.value_dim), query(s.total_q, s.heads, s.head_dim);
  const Layout key(s.total_k, s.kv_heads, s.head_dim), value(s.total_k, s.kv_heads, s.value_dim);
  const auto lse = s.lse(), lse_strides = row_major_strides(lse);
  Tensor output_rows;

  ProblemBuilder builder(packed.inputs(), args.options, packed.shapes(), /*shape_only=*/true);
  const auto add = [&](TensorView Problem::*field, const Layout& t) { builder.add(field, t.sizes, t.strides, type); };
  builder.add(&Problem::k_scale, in.k_scale);
  builder.add(&Problem::v_scale, in.v_scale);
  if (const Tensor* out = present(args.out)) {
    check_out_memory(*out, s.output(), in);
    output_rows = heads_first(*out);
    builder.add(&Problem::output, output_rows);
  } else {
    add(&Problem::output, output);
  }
  builder.add(&Problem::lse, lse, lse_strides, lse_dtype(type));
  const int64_t output_low_bytes =
      saves_output_low(backend, args) ? s.total_q * s.heads * s.value_dim * int64_t(c10::elementSize(type)) : 0;
  if (output_low_bytes > 0) add(&Problem::output_low, output);
  std::ostringstream json;
  json << "{";
  backend.explain_packed(json, packed.finish(builder), Pass::forward, in.query.device());
  if (present(in.block_table) || is_quantised(in.key)) {  // which have no gradient
    json << ", \"backward\": null";
  } else {
    add(&Problem::grad_output, output);
    add(&Problem::grad_query, query);
    add(&Problem::grad_key, key);
    add(&Problem::grad_value, value);
    const Tensor* relative = present(in.relative_bias);
    if (relative && relative->requires_grad()) builder.add(&Problem::grad_relative_bias, *relative);
    const Tensor* mask = present(in.attn_mask);
    const bool wants_mask = mask && mask->requires_grad();
    const auto grad_mask = wants_mask ? grad_mask_shape(backend, *mask, s) : VarlenShapes<int64_t>::Vector();
    const auto grad_mask_strides = row_major_strides(grad_mask);
    if (wants_mask) builder.add(&Problem::grad_mask, grad_mask, grad_mask_strides, lse_dtype(type));
    json << ", ";
    backend.explain_packed(json, packed.finish(builder), Pass::backward, in.query.device());
  }
  if (is_quantised(in.key)) json << ", \"quantised\": \"" << c10::getDtypeNames(in.key.scalar_type()).first << "\"";
  json << ", \"output_low_bytes\": " << output_low_bytes;
  json << ", \"device\": \"" << backend.device << "\", \"capability\": \"" << backend.capability() << "\"}";
  return json.str();
}

}  // namespace scaledot
