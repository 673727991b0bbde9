// Checks of an op's arguments that do not concern shapes. Those of shapes are in ops/common/shapes.h.
//
// Each looks at one property and throws with a message of one form: `argument: got X; needs Y`. Sizes may be symbolic,
// so the Meta kernels accept and refuse what the CPU kernels do.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "core/problem.h"
#include "ops/common/arguments.h"

namespace scaledot {

// Checks layouts, dtypes, devices and options. `needs_seed`: with dropout_p > 0 there must be a dropout_seed.
// `may_be_quantised`: key and value each have query's dtype or one of 8 bits.
void check_arguments(const SdpaInputs& inputs, const AttentionOptions& options, bool needs_seed = true,
                     bool may_be_quantised = false);

// Parts of it, for ops with other arguments.
void check_strided(const Tensor& tensor, const char* name);
void check_dropout(double dropout_p);
void check_seed(const Tensor& seed, c10::Device other);
void check_positions(const AttentionOptions& options);  // causal_alignment, windows, part
void check_on_device(const Tensor& tensor, const char* name, const Tensor& query);
void check_result_dtype(const Tensor& tensor, const char* name, at::ScalarType type);
void check_has_low_part(const Tensor& query, const char* argument, const char* got);  // of its output

// Nested tensors reach only the Autograd kernels: below them torch knows no kernel, and says so without naming an
// argument.
void check_not_nested(const Tensor& query, const Tensor& key, const Tensor& value);

// A storage may be resized under its tensors (untyped_storage().resize_). They keep their sizes, and reading them would
// be an access to memory that is not theirs. For tensors with data: kernels call these before they read.
void check_storage(const Tensor& tensor, const char* name);
template <class Inputs>
void check_storages(const Inputs& inputs) {
  for_each_input(inputs, [](const auto& row) {
    if (const Tensor* tensor = present(row.tensor)) check_storage(*tensor, row.name);
  });
}

// Checks the numbers of a block mask, which are in host memory: `count` blocks have bits.
void check_block_numbers(const Tensor& blocks, int64_t count);

// Checks the numbers of key_indices, which are in host memory.
void check_key_indices(const Tensor& indices, int64_t key_length);

// Whether the formula of ops/sdpa/formula.h can stand for the kernels.
void check_differentiable(const SdpaInputs& inputs, const AttentionOptions& options);

// The mask by position alone. The options have passed check_positions.
PositionMask position_mask(const AttentionOptions& options, int64_t query_length, int64_t key_length);

DType dtype_of(at::ScalarType type);  // DType::none for a type that kernels do not know
bool is_kernel_float(at::ScalarType type);
bool is_quantised(const Tensor& tensor);  // of a dtype that quantised keys and values have
inline constexpr char kFloats[] = "torch.float32, torch.float64, torch.bfloat16 or torch.float16";
std::string dtype_name(at::ScalarType type);  // as Python spells it: torch.float32
inline at::ScalarType lse_dtype(at::ScalarType input) { return input == at::kDouble ? at::kDouble : at::kFloat; }

// Sizes as Python prints them: (2, 16), (5,).
template <class Int>
std::string shape_text(c10::ArrayRef<Int> sizes) {
  std::ostringstream text;
  text << "(";
  for (size_t d = 0; d < sizes.size(); ++d) text << (d ? ", " : "") << sizes[d];
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}
inline std::string shape_of(const Tensor& tensor) { return shape_text(tensor.sym_sizes()); }

}  // namespace scaledot
