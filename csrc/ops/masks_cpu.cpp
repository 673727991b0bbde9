// scaledot::sdpa_mask and scaledot::dropout_mask: what core/mask.h and core/philox.h decide, written out. The formula of
// the double backward (ops/formula.h) and the tests use them, so that there is one definition of each.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "core/mask.h"
#include "core/philox.h"
#include "ops/make_problem.h"

namespace scaledot {
namespace {

// -slope * |distance| for every slope, row and key, in memory order.
template <class T>
void write_bias(const Problem& p, T* bias) {
  std::vector<uint8_t> states(size_t(p.key_length));
  for (int64_t head = 0; head < p.heads; ++head) {
    for (int64_t i = 0; i < p.query_length; ++i, bias += p.key_length) {
      row_terms<T>(p, 0, head, i, {0, p.key_length}, bias, states.data());
    }
  }
}

Tensor2 sdpa_mask_cpu(const MaskArgs& args) {
  const MaskShapes<int64_t> shapes = check_mask<int64_t>(args);
  Problem p{};
  p.batch = 1;
  p.query_length = shapes.query_length;
  p.key_length = shapes.key_length;
  p.position = position_mask(position_options(args), p.query_length, p.key_length);

  Tensor attends_all(at::detail::empty_cpu({p.query_length, p.key_length}, at::kBool));
  bool* row = attends_all.mutable_data_ptr<bool>();
  for (int64_t i = 0; i < p.query_length; ++i, row += p.key_length) {
    for (int64_t j = 0; j < p.key_length; ++j) row[j] = attends(p, i, j);
  }

  Tensor bias(at::detail::empty_cpu(shapes.bias, lse_dtype(args.query.scalar_type())));
  if (present(args.alibi_slopes) && bias.numel() > 0) {
    const Tensor slopes = args.alibi_slopes->to(bias.scalar_type()).contiguous();
    p.heads = slopes.numel();
    p.alibi_slopes.data = const_cast<void*>(slopes.const_data_ptr());
    p.alibi_slopes.dtype = dtype_of(slopes.scalar_type());
    p.alibi_slopes.head_stride = 1;
    if (bias.scalar_type() == at::kDouble) {
      write_bias(p, bias.mutable_data_ptr<double>());
    } else {
      write_bias(p, bias.mutable_data_ptr<float>());
    }
  }
  return {attends_all, bias};
}

Tensor dropout_mask_cpu(const DropoutMaskArgs& args) {
  check_dropout_mask(args);
  const Tensor seed = args.seed.contiguous();
  Problem p{};
  p.heads = args.heads.expect_int();
  p.query_length = args.query_length.expect_int();
  p.key_length = args.key_length.expect_int();
  p.dropout_p = args.dropout_p;
  p.dropout_seed = seed.const_data_ptr<int64_t>();
  const int64_t batch = args.batch.expect_int();
  Tensor keep(at::detail::empty_cpu({batch, p.heads, p.query_length, p.key_length}, at::kBool));
  bool* data = keep.mutable_data_ptr<bool>();
  const int64_t grain = 1 + 32768 / larger<int64_t>(p.key_length, 1);  // rows; as torch's own grain, in elements
  at::parallel_for(0, batch * p.heads * p.query_length, grain, [&](int64_t begin, int64_t end) {
    uint8_t group[kDropoutGroup];
    for (int64_t r = begin; r < end; ++r) {
      const int64_t plane = r / p.query_length;
      const DropoutRow row = dropout_row(p, plane / p.heads, plane % p.heads, r % p.query_length);
      for (int64_t column = 0; column < p.key_length; column += kDropoutGroup) {
        dropout_keep_group(row, column / kDropoutGroup, group);
        const int64_t count = smaller<int64_t>(kDropoutGroup, p.key_length - column);
        for (int64_t k = 0; k < count; ++k) data[r * p.key_length + column + k] = group[k] != 0;
      }
    }
  });
  return keep;
}

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, CPU, m) {
  m.impl("sdpa_mask", mask_kernel<&sdpa_mask_cpu>);
  m.impl("dropout_mask", dropout_mask_kernel<&dropout_mask_cpu>);
}

}  // namespace scaledot
