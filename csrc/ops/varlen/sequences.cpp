#include "ops/varlen/sequences.h"

#include <ATen/ATen.h>

#include <vector>

#include "ops/common/checks.h"
#include "ops/sdpa/op.h"
#include "ops/varlen/checks.h"

namespace scaledot {
namespace {

struct Span {
  int64_t first, count;
};

// The rows and keys of each sequence, read on the CPU.
class Sequences {
 public:
  explicit Sequences(const VarlenInputs& in)
      : cu_seq_q_(numbers(in.cu_seq_q, "cu_seq_q")),
        cu_seq_k_(numbers(in.cu_seq_k, "cu_seq_k")),
        seqused_k_(numbers(in.seqused_k, "seqused_k")) {}

  int64_t count() const { return int64_t(cu_seq_q_.size()) - 1; }
  Span query(int64_t b) const { return {cu_seq_q_[b], cu_seq_q_[b + 1] - cu_seq_q_[b]}; }
  // All rows of key that belong to the sequence, and those that it attends to.
  Span key_slot(int64_t b) const {
    return cu_seq_k_.empty() ? Span{0, seqused_k_[b]} : Span{cu_seq_k_[b], cu_seq_k_[b + 1] - cu_seq_k_[b]};
  }
  Span key(int64_t b) const { return {key_slot(b).first, seqused_k_.empty() ? key_slot(b).count : seqused_k_[b]}; }

 private:
  // Tensors of torch.func and of tracers have no memory to read: they are asked for each number, which some refuse.
  static std::vector<int64_t> numbers(const OptionalTensor& tensor, const char* name) {
    if (!present(tensor)) return {};
    const Tensor on_cpu = tensor->to(at::kCPU, at::kLong).contiguous();
    if (on_cpu.has_storage() && !on_cpu.key_set().has(c10::DispatchKey::Python)) {
      const int64_t* data = on_cpu.const_data_ptr<int64_t>();
      return {data, data + on_cpu.numel()};
    }
    std::vector<int64_t> result(size_t(on_cpu.numel()));
    try {
      for (size_t k = 0; k < result.size(); ++k) result[k] = on_cpu[int64_t(k)].item<int64_t>();
    } catch (const c10::Error& error) {
      TORCH_CHECK_NOT_IMPLEMENTED(false, name,
                                  ": got a tensor whose numbers cannot be read here, as forward mode and the double "
                                  "backward have to; needs one that torch.vmap does not batch (",
                                  error.what_without_backtrace(), ")");
    }
    return result;
  }

  const std::vector<int64_t> cu_seq_q_, cu_seq_k_, seqused_k_;
};

// The rows of one sequence, (heads, length, columns), and back.
Tensor rows_of(const Tensor& packed, Span rows) { return packed.narrow(0, rows.first, rows.count).transpose(0, 1); }
Tensor packed_again(const std::vector<Tensor>& rows, const Tensor& like) {
  return rows.empty() ? like : at::cat(rows, 1).transpose(0, 1);
}

// A sequence's arguments for scaledot::sdpa.
struct OneSequence {
  Tensor query, key, value;
  OptionalTensor slopes, seed, relative, mask;

  OneSequence(const VarlenInputs& in, const Sequences& sequences, int64_t b)
      : query(rows_of(in.query, sequences.query(b))),
        key(keys(in, in.key, sequences, b)),
        value(keys(in, in.value, sequences, b)) {
    if (const Tensor* given = present(in.alibi_slopes)) slopes = given->dim() == 2 ? given->select(0, b) : *given;
    if (const Tensor* given = present(in.relative_bias))
      relative = given->dim() == 3 ? given->select(0, given->size(0) == 1 ? 0 : b) : *given;
    if (const Tensor* given = present(in.attn_mask)) mask = mask_of(*given, sequences, b);
    if (const Tensor* given = present(in.dropout_seed)) {
      const bool several = given->dim() == 2;
      const int64_t share = several ? sequences.count() / given->size(0) : sequences.count();
      const Tensor of_group = several ? given->select(0, b / share) : *given;
      seed = of_group.add(at::stack({at::zeros({}, given->options()), at::full({}, b % share, given->options())}));
    }
  }

  SdpaInputs inputs() const {
    return {.query = query,
            .key = key,
            .value = value,
            .attn_mask = mask,
            .alibi_slopes = slopes,
            .dropout_seed = seed,
            .relative_bias = relative};
  }

 private:
  // With a column for each key of the sequence: those that are before the mask are allowed.
  static Tensor mask_of(const Tensor& mask, const Sequences& sequences, int64_t b) {
    const Span rows = sequences.query(b);
    const c10::SymInt padding[] = {sequences.key(b).count - mask.size(-1), 0};
    return at::constant_pad_nd_symint(mask.narrow(-2, rows.first, rows.count), padding,
                                      mask.scalar_type() == at::kBool ? 1 : 0);
  }
  static Tensor keys(const VarlenInputs& in, const Tensor& tensor, const Sequences& sequences, int64_t b) {
    const Span rows = sequences.key(b);
    if (!present(in.block_table)) return rows_of(tensor, rows);
    const Tensor pages = in.block_table->select(0, b).narrow(0, 0, (rows.count + tensor.size(1) - 1) / tensor.size(1));
    return rows_of(tensor.index_select(0, pages).flatten(0, 1), rows);
  }
};

// The gradient of the columns of attn_mask from that of `mask` of a sequence.
Tensor mask_columns(const Tensor& gradient, c10::SymInt columns) {
  const c10::SymInt padding[] = {columns - gradient.size(-1), 0};  // a negative number takes columns away
  return at::constant_pad_nd_symint(gradient, padding);
}

// The gradient of relative_bias from those of the sequences: one after the other if each has its own, or their sum.
Tensor relative_gradient(const Tensor& bias, const std::vector<Tensor>& of_sequences) {
  if (of_sequences.empty()) return at::zeros_like(bias);
  if (bias.dim() == 3 && bias.size(0) > 1) return at::stack(of_sequences);
  Tensor sum = of_sequences[0];
  for (size_t b = 1; b < of_sequences.size(); ++b) sum = sum + of_sequences[b];
  return bias.dim() == 3 ? sum.unsqueeze(0) : sum;
}

}  // namespace

Tensor2 varlen_by_sequence(const VarlenArgs& args) {
  const VarlenInputs& in = args.inputs;
  const auto shapes = check_varlen<int64_t>(args);
  const Sequences sequences(in);
  std::vector<Tensor> outputs, lses;
  for (int64_t b = 0; b < sequences.count(); ++b) {
    const OneSequence one(in, sequences, b);
    auto [output, lse, weights] =
        call<SdpaOp>({one.inputs(), args.options, /*return_weights=*/false, /*average_weights=*/false});
    outputs.push_back(std::move(output));
    lses.push_back(std::move(lse));
  }
  if (outputs.empty()) {
    const at::TensorOptions of_lse = in.query.options().dtype(lse_dtype(in.query.scalar_type()));
    return {at::zeros(shapes.output(), in.query.options()), at::zeros(shapes.lse(), of_lse)};
  }
  return {packed_again(outputs, in.query), at::cat(lses, 1)};
}

VarlenGradients varlen_backward_by_sequence(const VarlenBackwardArgs& args) {
  const VarlenInputs& in = args.inputs;
  check_varlen_backward(args, check_varlen<int64_t>(args.forward()));
  const Sequences sequences(in);
  const auto& wanted = args.output_mask;
  std::vector<Tensor> gradients[5];
  for (int64_t b = 0; b < sequences.count(); ++b) {
    const OneSequence one(in, sequences, b);
    const Span rows = sequences.query(b);
    OptionalTensor grad_output, grad_lse, saved;
    if (present(args.grad_output)) grad_output = rows_of(*args.grad_output, rows);
    if (present(args.grad_lse)) grad_lse = args.grad_lse->narrow(1, rows.first, rows.count);
    if (present(args.saved)) saved = rows_of(*args.saved, rows);
    const Tensor output = rows_of(args.output, rows), lse = args.lse.narrow(1, rows.first, rows.count);
    auto [grad_query, grad_key, grad_value, grad_mask, grad_relative, grad_numbers] =
        call<SdpaBackwardOp>({grad_output,
                              grad_lse,
                              kNoTensor,
                              one.inputs(),
                              output,
                              lse,
                              kNoTensor,
                              saved,
                              args.options,
                              std::nullopt,
                              {wanted[0], wanted[1], wanted[2], wanted[4], wanted[3]}});
    if (wanted[0]) gradients[0].push_back(grad_query);
    if (wanted[3]) gradients[3].push_back(grad_relative);
    if (wanted[4]) gradients[4].push_back(mask_columns(grad_mask, in.attn_mask->size(-1)));
    const c10::SymInt unused = sequences.key_slot(b).count - sequences.key(b).count;
    const c10::SymInt padding[] = {0, 0, 0, unused};  // keys that seqused_k leaves out
    if (wanted[1]) gradients[1].push_back(at::constant_pad_nd_symint(grad_key, padding));
    if (wanted[2]) gradients[2].push_back(at::constant_pad_nd_symint(grad_value, padding));
  }
  const Tensor none = at::empty({0}, in.query.options());
  const Tensor* const inputs[] = {&in.query, &in.key, &in.value};
  Tensor results[3];
  for (int k = 0; k < 3; ++k) results[k] = wanted[k] ? packed_again(gradients[k], at::zeros_like(*inputs[k])) : none;
  const Tensor of_relative = wanted[3] ? relative_gradient(*in.relative_bias, gradients[3]) : none;
  const Tensor of_mask = !wanted[4]             ? none
                         : gradients[4].empty() ? at::zeros_like(*in.attn_mask)
                                                : at::cat(gradients[4], -2);
  return {results[0], results[1], results[2], of_relative, of_mask};
}

}  // namespace scaledot
