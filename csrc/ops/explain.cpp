// scaledot::explain: which kernel of the table a call would use, why each faster one was refused, and its workspace.
#include <torch/library.h>

#include <sstream>

#include "ops/make_problem.h"
#include "ops/run_cpu.h"

namespace scaledot {
namespace {

// Kernel names and reasons are literals of ours without a quote or backslash: nothing to escape.
void explain_pass(std::ostringstream& json, const Problem& problem, Pass pass) {
  const KernelTable table = cpu_kernels();
  const Kernel& chosen = select(table, problem, pass);
  json << (pass == Pass::forward ? "\"forward\": " : "\"backward\": ") << "{\"kernel\": \"" << chosen.name
       << "\", \"refused\": [";
  const char* separator = "";
  for (const Kernel* kernel = table.kernels; kernel != &chosen && kernel != table.kernels + table.count; ++kernel) {
    if (const char* reason = kernel->why_not(problem, pass)) {
      json << separator << "[\"" << kernel->name << "\", \"" << reason << "\"]";
      separator = ", ";
    }
  }
  json << "], \"workspace_bytes\": " << chosen.workspace(problem, pass, cpu_workers(problem)) << "}";
}

std::string explain_cpu(const SdpaArgs& args) {
  const SdpaInputs& in = args.inputs;
  check_arguments(in, args.options, /*needs_seed=*/false);
  const Shapes<int64_t> shapes = infer_shapes<int64_t>(in, args.options.enable_gqa);
  const at::ScalarType type = in.query.scalar_type();
  const auto output = shapes.output(), output_strides = shapes.output_strides();
  const auto lse = shapes.lse(), lse_strides = contiguous_strides(lse);
  const auto weights = shapes.weights(), weights_strides = contiguous_strides(weights);
  const auto key = shapes.kernel_key(), key_strides = contiguous_strides(key);
  const auto value = shapes.kernel_value(), value_strides = contiguous_strides(value);
  const auto query = shapes.kernel_query(), query_strides = contiguous_strides(query);

  ProblemBuilder builder(in, args.options, shapes, /*pretend=*/true);
  // Heads that with_heads would repeat become a tensor of their own.
  if (needs_heads(in.key, shapes.kv_heads)) builder.add(&Problem::key, key, key_strides, type);
  if (needs_heads(in.value, shapes.kv_heads)) builder.add(&Problem::value, value, value_strides, type);
  builder.add(&Problem::output, output, output_strides, type);
  builder.add(&Problem::lse, lse, lse_strides, lse_dtype(type));
  if (args.return_weights) builder.add(&Problem::weights, weights, weights_strides, type);
  const Problem forward = builder.finish();

  builder.add(&Problem::grad_output, output, output_strides, type);
  if (args.return_weights) builder.add(&Problem::grad_weights, weights, weights_strides, type);
  builder.add(&Problem::grad_query, query, query_strides, type);
  builder.add(&Problem::grad_key, key, key_strides, type);
  builder.add(&Problem::grad_value, value, value_strides, type);
  const Tensor* mask = present(in.attn_mask);
  if (mask && mask->is_floating_point() && mask->requires_grad()) builder.add(&Problem::grad_mask, *mask);
  const Problem backward = builder.finish();

  std::ostringstream json;
  json << "{";
  explain_pass(json, forward, Pass::forward);
  json << ", ";
  explain_pass(json, backward, Pass::backward);
  json << ", \"device\": \"cpu\", \"capability\": \"" << cpu_capability() << "\"}";
  return json.str();
}

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, CPU, m) { m.impl("explain", explain_kernel<&explain_cpu>); }
// Meta tensors stand for tensors that do not fit in memory; they are answered for the CPU.
TORCH_LIBRARY_IMPL(scaledot, Meta, m) { m.impl("explain", explain_kernel<&explain_cpu>); }

}  // namespace scaledot
