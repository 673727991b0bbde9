// What a graph node saves besides tensors: the structs of options, owning what they point to. save() and get() are to and from
// such a struct, each(self, visit) calls visit(member) for every member.
#pragma once

#include <string>
#include <vector>

#include "ops/schema.h"
#include "ops/varlen_schema.h"

namespace scaledot {

struct SavedOptions {
  double dropout_p = 0.0;
  bool is_causal = false;
  std::optional<double> scale;
  bool enable_gqa = false;
  std::string causal_alignment;
  std::optional<c10::SymInt> window_left, window_right;
  std::optional<double> softcap, masked_score;
  std::string pattern;
  std::vector<c10::SymInt> pattern_args, part;

  void save(const OptionArgs& o) {
    dropout_p = o.dropout_p;
    is_causal = o.is_causal;
    scale = o.scale;
    enable_gqa = o.enable_gqa;
    causal_alignment = o.causal_alignment;
    window_left = o.window_left;
    window_right = o.window_right;
    softcap = o.softcap;
    masked_score = o.masked_score;
    pattern = o.pattern;
    pattern_args = numbers(o.pattern_args).vec();
    part = numbers(o.part).vec();
  }

  OptionArgs get() const {
    return {dropout_p,    is_causal, scale,        enable_gqa, causal_alignment, window_left,
            window_right, softcap,   masked_score, pattern,    pattern_args,     part};
  }

  template <class Self, class Visit>
  static void each(Self& self, const Visit& visit) {
    visit(self.dropout_p);
    visit(self.is_causal);
    visit(self.scale);
    visit(self.enable_gqa);
    visit(self.causal_alignment);
    visit(self.window_left);
    visit(self.window_right);
    visit(self.softcap);
    visit(self.masked_score);
    visit(self.pattern);
    visit(self.pattern_args);
    visit(self.part);
  }
};

struct SavedVarlenOptions {
  c10::SymInt max_q, max_k;
  SavedOptions of_sequence;
  std::optional<c10::SymInt> num_splits;

  void save(const VarlenOptionArgs& o) {
    max_q = o.max_q;
    max_k = o.max_k;
    of_sequence.save(o.of_sequence());
    num_splits = o.num_splits;
  }

  VarlenOptionArgs get() const {
    const OptionArgs o = of_sequence.get();
    return {max_q,         max_k,          o.dropout_p, o.is_causal, o.scale,        o.enable_gqa, o.causal_alignment,
            o.window_left, o.window_right, o.softcap,   o.pattern,   o.pattern_args, num_splits};
  }

  template <class Self, class Visit>
  static void each(Self& self, const Visit& visit) {
    visit(self.max_q);
    visit(self.max_k);
    SavedOptions::each(self.of_sequence, visit);
    visit(self.num_splits);
  }
};

}  // namespace scaledot
