// The kernels for Hopper on packed sequences, run on the host. Every sequence is compared with the reference kernel in
// float64 on that sequence alone.
#include "device_packed_check.h"

namespace scaledot::testing {
namespace {

const DeviceKernel& sm90() { return cuda_kernels().kernels[0]; }

class DeviceSm90Packed : public ::testing::TestWithParam<PackedCase> {};

TEST_P(DeviceSm90Packed, EverySequenceAgreesWithReference) {
  PackedBuilt b = build(GetParam());
  ASSERT_EQ(sm90().why_not(b.problem, Pass::forward), nullptr) << sm90().why_not(b.problem, Pass::forward);
  solve_sequences(b);
  run_packed(sm90(), b, Pass::forward);
  expect_forward(b);
  if (forward_only(GetParam())) return;
  prepare_backward(b);
  if (sm90().why_not(b.problem, Pass::backward)) return;  // BackwardTakesWhatTheForwardDoes says for which
  const int64_t launched = sim::launches();
  run_packed(sm90(), b, Pass::backward);
  EXPECT_EQ(sim::launches() - launched, 4);
  expect_backward(b);
}

void align(Case& c) {
  constexpr int64_t kBytes = 16;  // that strides are multiples of
  const int64_t unit = kBytes / element_size(cache_dtype(c));
  c.order = c.seed % 2 ? MemoryOrder::aligned_blhd : MemoryOrder::aligned;
  c.head_dim = round_up(c.head_dim, unit), c.value_dim = round_up(c.value_dim, unit);
}

// The 16-bit cases of the library, with aligned addresses, that the kernels support.
const std::vector<PackedCase>& library_cases() {
  static const std::vector<PackedCase> list = [] {
    std::vector<PackedCase> result;
    for (PackedCase c : packed_cases()) {
      if (element_size(c.common.dtype) != 2) continue;
      align(c.common);
      const PackedBuilt b = build(c, /*values=*/false);
      if (!sm90().why_not(b.problem, Pass::forward)) result.push_back(c);
    }
    return result;
  }();
  return list;
}

// Sequences that end within tiles and at their ends, and several tiles a block. NaN in one sequence must not
// reach another.
std::vector<PackedCase> own_cases() {
  struct PackedFeature {
    const char* name;
    std::vector<Lengths> lengths;
    std::function<void(PackedCase&)> set;
  };
  const std::vector<Lengths> tiles = {{300, 410}, {1, 70}, {129, 128}, {64, 257}, {192, 128}};
  const std::vector<PackedFeature> list = {
      {"tiles", tiles, [](PackedCase&) {}},
      {"causal", tiles, [](PackedCase& c) { c.common.causal = c.common.nan_in_masked = true; }},
      {"upper_left", tiles,
       [](PackedCase& c) { c.common.causal = c.common.nan_in_masked = true, c.common.lower_right = false; }},
      {"window",
       {{30, 100}, {20, 300}, {7, 60}},
       [](PackedCase& c) { c.common.window_left = 20, c.common.window_right = 3, c.common.nan_in_masked = true; }},
      {"nan_in_live_value", {{40, 50}, {70, 90}, {20, 30}}, [](PackedCase& c) { c.common.nan_in_live_value = true; }},
      // The first sequence has no NaN. The second one has it in values, within the first one's tile of keys.
      {"nan_of_neighbour",
       {{40, 40}, {3, 60}, {30, 30}},
       [](PackedCase& c) { c.common.causal = c.common.nan_in_masked = true, c.common.lower_right = false; }},
      // More tiles to repair than blocks.
      {"many_nan", std::vector<Lengths>(12, {3, 9}),
       [](PackedCase& c) {
         c.common.heads = c.common.kv_heads = 2;
         c.common.causal = c.common.nan_in_masked = true, c.common.lower_right = false;
       }},
      {"heads", tiles, [](PackedCase& c) { c.common.heads = 6, c.common.kv_heads = 2, c.common.causal = true; }},
      {"unused", tiles, [](PackedCase& c) { c.unused = 30; }},
      {"empty", {{0, 20}, {20, 0}, {0, 0}, {66, 70}, {0, 5}, {5, 9}, {0, 0}}, [](PackedCase&) {}},
      {"one", {{140, 270}}, [](PackedCase& c) { c.common.causal = true; }},
      {"short", std::vector<Lengths>(40, {3, 5}), [](PackedCase& c) { c.common.causal = true; }},
      {"large", {{130, 140}, {20, 200}}, [](PackedCase& c) { c.common.spread = 3000; }},
      // Pages smaller and larger than a tile of keys, and such that a copy moves less than a page. Rows after the last
      // key of a page, and pages that belong to no sequence, are NaN.
      {"pages_of_8", tiles, [](PackedCase& c) { c.page_size = 8, c.common.causal = true; }},
      {"pages_of_48", tiles, [](PackedCase& c) { c.page_size = 48, c.common.heads = 4, c.common.kv_heads = 2; }},
      {"pages_of_64", tiles, [](PackedCase& c) { c.page_size = 64, c.common.window_left = 90; }},
      {"pages_of_256", tiles, [](PackedCase& c) { c.page_size = 256, c.common.nan_in_live_value = true; }},
      {"e4m3", tiles, [](PackedCase& c) { c.common.cache = DType::float8_e4m3fn, c.common.causal = true; }},
      {"e5m2", tiles, [](PackedCase& c) { c.common.cache = DType::float8_e5m2, c.common.heads = 2; }},
      {"int8_window", tiles, [](PackedCase& c) { c.common.cache = DType::int8, c.common.window_left = 90; }},
      {"e4m3_pages", tiles,
       [](PackedCase& c) {
         c.common.cache = DType::float8_e4m3fn, c.page_size = 16;
         c.common.heads = 4, c.common.kv_heads = 2, c.common.causal = true;
       }},
      {"int8_empty", {{0, 20}, {20, 0}, {66, 70}, {0, 0}}, [](PackedCase& c) { c.common.cache = DType::int8; }},
      {"e5m2_unused", tiles, [](PackedCase& c) { c.common.cache = DType::float8_e5m2, c.unused = 30; }},
      {"pages_empty", {{0, 20}, {20, 0}, {66, 70}, {0, 0}}, [](PackedCase& c) { c.page_size = 16; }},
  };
  constexpr int64_t kDims[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256},
                                  {40, 24}, {96, 72},   {160, 96},  {192, 136}};
  std::vector<PackedCase> result;
  size_t next = 0;
  for (const PackedFeature& feature : list)
    for (int which = 0; which < 4; ++which, ++next) {
      const size_t turn = next / 4 + size_t(which);
      const auto& dims = kDims[turn % 2 ? which : which + 4];
      PackedCase c;
      c.lengths = feature.lengths;
      c.common.dtype = turn % 4 < 2 ? DType::bfloat16 : DType::float16, c.common.seed = next + 1;
      c.common.heads = c.common.kv_heads = 1, c.common.head_dim = dims[0], c.common.value_dim = dims[1];
      c.common.lower_right = true;
      feature.set(c);
      c.name = std::string(feature.name) + "_" + std::to_string(dims[0]) + "x" + std::to_string(dims[1]) + "_" +
               dtype_name(c.common.dtype);
      align(c.common);
      result.push_back(c);
    }
  return result;
}

const auto name_of = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Library, DeviceSm90Packed, ::testing::ValuesIn(library_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Tiles, DeviceSm90Packed, ::testing::ValuesIn(own_cases()), name_of);

// A kernel that refused everything would pass all other tests.
TEST(DeviceSm90PackedCases, SupportSomeOfTheLibrary) { EXPECT_GE(library_cases().size(), size_t(8)); }

TEST(DeviceSm90PackedCases, BackwardTakesWhatTheForwardDoes) {
  for (const PackedCase& c : own_cases()) {
    PackedBuilt b = build(c, /*values=*/false);
    ask_for_gradients(b);
    const char* reason = sm90().why_not(b.problem, Pass::backward);
    EXPECT_EQ(reason != nullptr, forward_only(c)) << c.name << ": " << (reason ? reason : "");
  }
}

TEST(DeviceSm90PackedCases, WhyNotNamesTheReason) {
  const auto reason = [](const std::function<void(PackedCase&)>& set, Pass pass = Pass::forward) {
    PackedCase c;
    c.lengths = {{30, 40}, {20, 70}};
    c.common.dtype = DType::bfloat16, c.common.head_dim = c.common.value_dim = 64;
    c.common.order = MemoryOrder::aligned;
    set(c);
    PackedBuilt b = build(c);
    if (pass == Pass::backward) ask_for_gradients(b);
    const char* said = sm90().why_not(b.problem, pass);
    return std::string(said ? said : "");
  };
  EXPECT_EQ(reason([](PackedCase&) {}), "");
  EXPECT_EQ(reason([](PackedCase&) {}, Pass::backward), "");
  const std::string general = "the sequences are packed, with attn_mask, softcap, ALiBi or dropout";
  EXPECT_EQ(reason([](PackedCase& c) { c.common.softcap = 2; }, Pass::backward), general);
  EXPECT_EQ(reason([](PackedCase& c) { c.common.dropout_p = 0.5; }, Pass::backward), general);
  const auto masked = [](PackedCase& c) { c.common.mask = MaskKind::boolean, c.common.mask_columns = 9; };
  EXPECT_EQ(reason(masked, Pass::backward), general);
  EXPECT_NE(reason(masked).find("attn_mask"), std::string::npos);
  EXPECT_EQ(reason([](PackedCase& c) { c.lengths = {{0, 3}, {0, 5}}; }, Pass::backward), "there are no queries");
  EXPECT_EQ(reason([](PackedCase& c) { c.page_size = 16; }), "");
  EXPECT_EQ(reason([](PackedCase& c) { c.page_size = 16; }, Pass::backward),
            "keys and values in pages have no backward");
  EXPECT_EQ(reason([](PackedCase& c) { c.page_size = 12; }), "the rows of a page are not a multiple of 8");
  const auto quantised = [](PackedCase& c) { c.common.cache = DType::int8; };
  EXPECT_EQ(reason(quantised), "");
  EXPECT_EQ(reason(quantised, Pass::backward), "quantised keys and values have no backward");
  EXPECT_EQ(reason([&](PackedCase& c) { quantised(c), c.common.head_dim = 33; }), "head_dim or value_dim is odd");
  EXPECT_NE(reason([](PackedCase& c) { c.common.softcap = 2; }).find("softcap"), std::string::npos);
  EXPECT_NE(reason([](PackedCase& c) { c.common.dropout_p = 0.5; }).find("dropout"), std::string::npos);
  EXPECT_EQ(reason([](PackedCase& c) { c.lengths = {{3, 0}, {5, 0}}; }), "there are no keys");
  EXPECT_NE(reason([](PackedCase& c) { c.common.order = MemoryOrder::contiguous; }).find("address"), std::string::npos);
  EXPECT_NE(reason([](PackedCase& c) { c.lengths = {{1, 2000}, {4, 3000}}; }).find("few rows"), std::string::npos);
}

}  // namespace
}  // namespace scaledot::testing
