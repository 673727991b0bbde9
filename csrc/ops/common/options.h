// The options of an attention call that are not tensors. Each is declared here and nowhere else: a member of
// UserOptions or AttentionOptions with its type, default and meaning, and a row of kOptions with its name and the ops
// that have it.
//
// The schemas of the ops, the functions that the dispatcher calls, what a graph node saves for the backward and for
// compiled autograd, and the C++ calls follow from these two (ops/common/op.h). docs/extending.md adds an option.
#pragma once

#include <c10/core/SymInt.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace scaledot {

// The options that users of every attention function may set.
struct UserOptions {
  double dropout_p = 0.0;  // inverted dropout on the weights, in [0, 1]
  bool is_causal = false;
  std::optional<double> scale;  // default: 1 / sqrt(head_dim)
  bool enable_gqa = false;
  std::string causal_alignment = "upper_left";  // or "lower_right"; packed sequences have it by default
  std::optional<c10::SymInt> window_left;       // absent: unbounded
  std::optional<c10::SymInt> window_right;
  std::optional<double> softcap;
};

// The options that the ops take.
struct AttentionOptions : UserOptions {
  AttentionOptions() = default;
  explicit AttentionOptions(const UserOptions& options) : UserOptions(options) {}

  std::optional<double> masked_score;  // what a masked position of a boolean attn_mask scores; absent: -inf
  // The call's place in a larger attention (Part in core/problem.h): diagonal, row, key, batch, head, heads.
  std::vector<c10::SymInt> part;
  // A block mask's numbers of rows and keys in a block, and the lengths of query and key that it is for.
  std::vector<c10::SymInt> block_shape;
};

// The ops that may have an option. sdpa stands for its recorded form, its backward and its explanation too, and so
// does varlen.
enum Ops : unsigned { kSdpa = 1, kVarlen = 2, kSdpaMask = 4 };

template <auto member_, unsigned ops_>
struct Option {
  static constexpr auto member = member_;
  static constexpr unsigned ops = ops_;
  const char* name;
};

// The schemas have this order.
inline constexpr std::tuple kOptions = {
    Option<&AttentionOptions::dropout_p, kSdpa | kVarlen>{"dropout_p"},
    Option<&AttentionOptions::is_causal, kSdpa | kVarlen | kSdpaMask>{"is_causal"},
    Option<&AttentionOptions::scale, kSdpa | kVarlen>{"scale"},
    Option<&AttentionOptions::enable_gqa, kSdpa | kVarlen>{"enable_gqa"},
    Option<&AttentionOptions::causal_alignment, kSdpa | kVarlen | kSdpaMask>{"causal_alignment"},
    Option<&AttentionOptions::window_left, kSdpa | kVarlen | kSdpaMask>{"window_left"},
    Option<&AttentionOptions::window_right, kSdpa | kVarlen | kSdpaMask>{"window_right"},
    Option<&AttentionOptions::softcap, kSdpa | kVarlen>{"softcap"},
    Option<&AttentionOptions::masked_score, kSdpa>{"masked_score"},
    Option<&AttentionOptions::part, kSdpa>{"part"},
    Option<&AttentionOptions::block_shape, kSdpa>{"block_shape"},
};

}  // namespace scaledot
