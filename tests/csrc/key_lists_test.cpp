// Kernels for lists of keys, on lists that have the keys which a boolean mask shows: the oracle of the mask is theirs.
#include <algorithm>

#include "kernel_check.h"

namespace scaledot::testing {
namespace {

// The lists that say what the mask of `b` says, in any order, with entries of -1 among them.
template <class Index>
struct Lists {
  std::vector<Index> entries;
  int64_t heads, length;

  Lists(const Built& b, int64_t list_heads) : heads(list_heads), length(b.c.key_length + 5) {
    const Problem p = b.problem();
    Random random(7);
    for (int64_t batch = 0; batch < p.batch; ++batch)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < p.query_length; ++i) {
          std::vector<Index> list;
          for (int64_t j = 0; j < p.key_length; ++j)
            if (sees(p, batch, h * (p.heads / heads), i, j)) list.push_back(Index(j));
          list.resize(size_t(length), Index(-1));
          for (size_t k = list.size(); k > 1; --k) std::swap(list[k - 1], list[size_t(random.uniform() * double(k))]);
          entries.insert(entries.end(), list.begin(), list.end());
        }
  }

  Problem problem(const Built& b) {
    Problem p = b.problem();
    p.attn_mask = {};
    p.list_length = length, p.heads_per_list = p.heads / heads;
    p.key_indices.data = entries.data();
    p.key_indices.dtype = sizeof(Index) == 8 ? DType::int64 : DType::int32;
    p.key_indices.col_stride = 1, p.key_indices.row_stride = length;
    p.key_indices.head_stride = p.query_length * length;
    p.key_indices.batch_stride[0] = heads * p.key_indices.head_stride;
    return p;
  }
};

struct Named {
  const char* name;
  int64_t list_heads;
  Case c;
};

std::vector<Named> named_cases() {
  std::vector<Named> result;
  const auto add = [&](const char* name, int64_t list_heads, const auto& change) {
    Case c;
    c.name = name;
    c.mask = MaskKind::boolean;
    c.mask_broadcast.head = list_heads == 1;
    change(c);
    result.push_back({name, list_heads, c});
  };
  add("a_list_a_head", 2, [](Case&) {});
  add("one_list", 1, [](Case&) {});
  add("empty_rows", 1, [](Case& c) { c.empty_rows = true; });
  add("causal", 1, [](Case& c) { c.causal = c.lower_right = true; });
  add("window", 2, [](Case& c) { c.window_left = 9, c.window_right = 4; });
  add("softcap", 1, [](Case& c) { c.softcap = 2; });
  add("negative_scale", 1, [](Case& c) { c.scale = -0.3; });
  add("many_heads", 1, [](Case& c) { c.heads = 37, c.kv_heads = 1, c.query_length = 5; });
  add("narrow", 1, [](Case& c) { c.head_dim = 3, c.value_dim = 1; });
  add("wide", 1, [](Case& c) { c.head_dim = 140, c.value_dim = 136, c.key_length = 150; });
  // Heads that share a list, as the tile unit takes them: parts of a tile, several tiles, several groups of keys.
  add("six_heads", 1, [](Case& c) { c.heads = 12, c.kv_heads = 2, c.query_length = 9; });
  add("six_heads_empty_rows", 1, [](Case& c) { c.heads = 6, c.kv_heads = 1, c.empty_rows = true; });
  add("six_heads_causal", 1, [](Case& c) { c.heads = 6, c.kv_heads = 1, c.causal = c.lower_right = true; });
  add("six_heads_softcap", 1, [](Case& c) { c.heads = 6, c.kv_heads = 1, c.softcap = 2; });
  add("six_heads_narrow", 1, [](Case& c) { c.heads = 6, c.kv_heads = 1, c.head_dim = 3, c.value_dim = 1; });
  add("six_heads_nan_in_masked", 1,
      [](Case& c) { c.heads = 6, c.kv_heads = 1, c.nan_in_masked = c.empty_rows = true; });
  add("six_heads_nan_in_live_value", 1, [](Case& c) { c.heads = 6, c.kv_heads = 1, c.nan_in_live_value = true; });
  add("six_heads_no_grad_output", 1, [](Case& c) { c.heads = 6, c.kv_heads = 1, c.grad_output = false; });
  add("six_heads_only_grad_key", 1,
      [](Case& c) { c.heads = 6, c.kv_heads = 1, c.wants_query = c.wants_value = false; });
  add("sixteen_heads_long", 1, [](Case& c) { c.heads = 16, c.kv_heads = 1, c.query_length = 5, c.key_length = 333; });
  add("many_heads_wide", 1, [](Case& c) {
    c.heads = 37, c.kv_heads = 1, c.query_length = 3, c.head_dim = 140, c.value_dim = 100, c.key_length = 150;
  });
  add("more_heads_than_a_tile_takes", 1, [](Case& c) { c.heads = 150, c.kv_heads = 1, c.query_length = 3; });
  add("one_row", 1, [](Case& c) { c.query_length = 1, c.heads = 4; });
  add("many_rows", 1, [](Case& c) { c.query_length = 130, c.batch = {1}, c.heads = c.kv_heads = 1; });
  add("nan_in_masked", 1, [](Case& c) { c.nan_in_masked = c.empty_rows = true; });
  add("nan_in_live_value", 1, [](Case& c) { c.nan_in_live_value = true; });
  add("no_grad_output", 1, [](Case& c) { c.grad_output = false; });
  add("only_grad_key", 1, [](Case& c) { c.wants_query = c.wants_value = false; });
  return result;
}

const std::vector<std::pair<DType, const char*>> kDTypes = {{DType::float64, "float64"},
                                                            {DType::float32, "float32"},
                                                            {DType::bfloat16, "bfloat16"},
                                                            {DType::float16, "float16"}};

class KeyLists : public ::testing::TestWithParam<std::tuple<std::string, size_t, size_t>> {};

template <class Index>
void check(const Kernel& kernel, const Named& named, DType dtype) {
  Case c = named.c;
  c.dtype = dtype;
  Built b = build(c);
  add_gradients(b);
  const Oracle oracle = solve(b);
  Lists<Index> lists(b, named.list_heads);
  const Problem p = lists.problem(b);
  ASSERT_EQ(kernel.why_not(p, Pass::backward), nullptr);
  for (int workers : {1, 3}) {
    SCOPED_TRACE(std::to_string(workers) + " workers");
    run(kernel, p, Pass::forward, workers);
    run(kernel, p, Pass::backward, workers);
    expect_forward(b, oracle);
    expect_backward(b, oracle);
  }
}

// The cases of a dtype that a kernel takes, by number.
std::vector<KeyLists::ParamType> kernel_cases() {
  std::vector<KeyLists::ParamType> result;
  const std::vector<Named> named = named_cases();
  for (int k = 0; k < cpu_kernels().count; ++k)
    for (size_t d = 0; d < kDTypes.size(); ++d)
      for (size_t n = 0; n < named.size(); ++n) {
        Case c = named[n].c;
        c.dtype = kDTypes[d].first;
        const Built b = build(c);
        Lists<int32_t> lists(b, named[n].list_heads);
        const Kernel& kernel = cpu_kernels().kernels[k];
        if (!kernel.why_not(lists.problem(b), Pass::backward)) result.emplace_back(kernel.name, d, n);
      }
  return result;
}

TEST_P(KeyLists, AreAsExactAsAMask) {
  const auto& [name, dtype, number] = GetParam();
  const Named named = named_cases()[number];
  SCOPED_TRACE(named.name);
  check<int32_t>(kernel_by_name(name), named, kDTypes[dtype].first);
  check<int64_t>(kernel_by_name(name), named, kDTypes[dtype].first);
}

std::string name_of(const ::testing::TestParamInfo<KeyLists::ParamType>& info) {
  return std::get<0>(info.param) + "_" + kDTypes[std::get<1>(info.param)].second + "_" +
         named_cases()[std::get<2>(info.param)].name;
}

INSTANTIATE_TEST_SUITE_P(Cpu, KeyLists, ::testing::ValuesIn(kernel_cases()), name_of);

// The tile unit takes bfloat16 with at least four heads that share a list and a KV head; the others take everything.
TEST(KernelsForLists, TakeWhatTheySay) {
  const auto refuses = [](const Kernel& kernel, DType dtype, int64_t heads, int64_t heads_per_list) {
    Problem p = {};
    p.dtype = dtype, p.heads = heads, p.kv_heads = 2, p.heads_per_list = heads_per_list;
    return kernel.why_not(p, Pass::forward) != nullptr;
  };
  int count = 0;
  for (int k = 0; k < cpu_kernels().count; ++k) {
    const Kernel& kernel = cpu_kernels().kernels[k];
    const std::string name = kernel.name;
    if (name.find("_key_lists") == std::string::npos || refuses(kernel, DType::bfloat16, 8, 8)) continue;
    SCOPED_TRACE(name);
    ++count;
    const bool tiles = name == "amx_bf16_key_lists";
    EXPECT_EQ(refuses(kernel, DType::bfloat16, 6, 6), tiles);
    EXPECT_EQ(refuses(kernel, DType::bfloat16, 8, 2), tiles);
    EXPECT_EQ(refuses(kernel, DType::float32, 8, 8), tiles);
  }
  EXPECT_GT(count, 0);
}

// Every other kernel refuses lists, and the first for lists that this machine can run is chosen.
TEST(SelectForLists, TakesAKernelForLists) {
  Problem p = {};
  p.heads_per_list = 1;
  for (Pass pass : {Pass::forward, Pass::backward}) {
    const std::string name = select(cpu_kernels(), p, pass).name;
    EXPECT_NE(name.find("_key_lists"), std::string::npos) << name;
  }
}

}  // namespace
}  // namespace scaledot::testing
