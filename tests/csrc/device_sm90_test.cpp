// The kernels for Hopper, run on the host on problems that they support, against the reference kernel in float64.
#include "device_check.h"
#include "kernel_cases.h"

namespace scaledot::testing {
namespace {

const DeviceKernel& sm90() { return cuda_kernels().kernels[0]; }

class DeviceSm90 : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceSm90, AgreesWithReference) {
  const Case& c = GetParam();
  const Built b = build(c);
  ASSERT_EQ(sm90().why_not(b.problem(), Pass::forward), nullptr) << sm90().why_not(b.problem(), Pass::forward);
  check_device_kernel(sm90(), c);
}

void align(Case& c) {
  c.order = c.seed % 2 ? MemoryOrder::aligned : MemoryOrder::aligned_blhd;
  c.head_dim = round_up(c.head_dim, 8), c.value_dim = round_up(c.value_dim, 8);
}

// The 16-bit cases of the library, with aligned addresses, that the kernels support.
const std::vector<Case>& library_cases() {
  static const std::vector<Case> list = [] {
    std::vector<Case> result;
    for (Case c : cases()) {
      if (element_size(c.dtype) != 2) continue;
      align(c);
      const Built b = build(c, /*values=*/false);
      if (!sm90().why_not(b.problem(), Pass::forward)) result.push_back(c);
    }
    return result;
  }();
  return list;
}

// Tiles have 128 rows and 64, 80 or 128 keys. These shapes end within tiles and at their ends, with several tiles a
// block, for every variant.
std::vector<Case> own_cases() {
  const std::vector<Feature> list = {
      {"tiles", [](Case& c) { c.query_length = 300, c.key_length = 410; }},
      {"whole_tiles", [](Case& c) { c.query_length = 384, c.key_length = 640; }},
      // An even number of tiles: clusters of two blocks, if they have 128 rows.
      {"pairs", [](Case& c) { c.heads = 2, c.query_length = 490, c.key_length = 330; }},
      {"pairs_of_few_keys",
       [](Case& c) { c.batch = {2}, c.query_length = 200, c.key_length = 70, c.return_weights = true; }},
      {"causal", [](Case& c) { c.query_length = c.key_length = 401, c.causal = c.nan_in_masked = true; }},
      // More tiles to repair than blocks.
      {"many_nan",
       [](Case& c) {
         c.batch = {2}, c.heads = c.kv_heads = 2, c.query_length = c.key_length = 290,
         c.causal = c.nan_in_masked = true;
       }},
      {"lower_right",
       [](Case& c) { c.query_length = 270, c.key_length = 390, c.causal = c.lower_right = c.nan_in_masked = true; }},
      {"more_rows_than_keys",
       [](Case& c) { c.query_length = 450, c.key_length = 130, c.causal = c.lower_right = c.nan_in_masked = true; }},
      {"window", [](Case& c) { c.query_length = c.key_length = 400, c.window_left = 70, c.window_right = 20; }},
      {"gqa_weights", [](Case& c) { c.heads = 4, c.query_length = 200, c.key_length = 150, c.return_weights = true; }},
      {"mean_weights",
       [](Case& c) {
         c.heads = 4, c.query_length = 200, c.key_length = 150, c.return_weights = c.average_weights = c.causal = true;
       }},
      {"bool_mask",
       [](Case& c) {
         c.query_length = 200, c.key_length = 270, c.mask = MaskKind::boolean, c.empty_rows = c.nan_in_masked = true;
       }},
      {"padding_nan",
       [](Case& c) {
         c.query_length = 200, c.key_length = 270, c.mask = MaskKind::boolean, c.nan_in_masked = true;
         c.mask_broadcast = {false, true, true, false};
       }},
      {"float_mask",
       [](Case& c) {
         c.query_length = 200, c.key_length = 270, c.mask = MaskKind::additive_with_inf, c.mask_dtype = DType::float32;
         c.causal = c.lower_right = true;
       }},
      {"masked_fill",
       [](Case& c) {
         c.query_length = 200, c.key_length = 270, c.mask = MaskKind::boolean, c.empty_rows = true;
         c.masked_score = -1e9;
       }},
      {"dropout_weights",
       [](Case& c) {
         c.query_length = 200, c.key_length = 270, c.dropout_p = 0.3, c.causal = c.return_weights = true;
       }},
      {"softcap_alibi",
       [](Case& c) {
         c.query_length = 200, c.key_length = 270, c.softcap = 2, c.alibi = AlibiKind::batch_heads, c.causal = true;
       }},
      {"everything",
       [](Case& c) {
         c.heads = 4, c.query_length = 200, c.key_length = 270, c.mask = MaskKind::additive_with_inf;
         c.mask_broadcast.batch = true, c.causal = c.lower_right = c.nan_in_masked = c.return_weights = true;
         c.window_left = 150, c.softcap = 3, c.alibi = AlibiKind::heads, c.dropout_p = 0.2, c.scale = 0.3;
       }},
      {"nan_in_live_value",
       [](Case& c) { c.query_length = c.key_length = 200, c.causal = c.nan_in_live_value = true; }},
      {"large", [](Case& c) { c.query_length = 130, c.key_length = 140, c.spread = 3000; }},
  };
  constexpr int64_t kDims[][2] = {{64, 64}, {128, 128}, {256, 256}, {192, 128},
                                  {40, 64}, {96, 72},   {192, 136}, {160, 96}};
  std::vector<Case> result;
  size_t next = 0;
  for (const Feature& feature : list)
    for (int which = 0; which < 4; ++which, ++next) {
      Case c;
      const size_t turn = next / 4 + size_t(which);
      const auto& dims = kDims[turn % 2 ? which : which + 4];
      c.dtype = turn % 4 < 2 ? DType::bfloat16 : DType::float16;
      c.batch = {1}, c.heads = c.kv_heads = 1, c.head_dim = dims[0], c.value_dim = dims[1], c.seed = next + 1;
      feature.set(c);
      c.name = std::string(feature.name) + "_" + std::to_string(c.head_dim) + "x" + std::to_string(c.value_dim) + "_" +
               dtype_name(c.dtype);
      align(c);
      result.push_back(c);
    }
  return result;
}

// Strides and broadcast dimensions, which become tensor maps of the copy engine.
std::vector<Case> layout_cases() {
  const std::vector<Feature> list = {
      {"batch_and_heads",
       [](Case& c) {
         c.batch = {2, 3}, c.heads = 4;
       }},
      {"blhd", [](Case& c) { c.batch = {3}, c.heads = 4, c.order = MemoryOrder::aligned_blhd; }},
      {"expanded_batch",
       [](Case& c) {
         c.batch = {2, 2}, c.heads = 2, c.key_broadcast.batch = true;
       }},
      {"expanded_heads", [](Case& c) { c.batch = {2}, c.heads = c.kv_heads = 2, c.key_broadcast.head = true; }},
      {"one_row", [](Case& c) { c.query_length = 1, c.key_length = 200; }},
      {"one_key", [](Case& c) { c.query_length = 130, c.key_length = 1; }},
      {"no_batch", [](Case& c) { c.batch = {}; }},
  };
  std::vector<Case> result;
  for (const Feature& feature : list)
    for (DType dtype : {DType::bfloat16, DType::float16}) {
      Case c;
      c.batch = {1}, c.dtype = dtype, c.heads = 2, c.kv_heads = 1, c.query_length = 70, c.key_length = 90;
      c.head_dim = 64, c.value_dim = 32, c.order = MemoryOrder::aligned;
      feature.set(c);
      c.name = std::string(feature.name) + "_" + dtype_name(dtype);
      result.push_back(c);
    }
  return result;
}

const auto name_of = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Library, DeviceSm90, ::testing::ValuesIn(library_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Tiles, DeviceSm90, ::testing::ValuesIn(own_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Layouts, DeviceSm90, ::testing::ValuesIn(layout_cases()), name_of);

// A kernel that refused everything would pass all other tests.
TEST(DeviceSm90Cases, SupportMostOfTheLibrary) { EXPECT_GE(library_cases().size(), size_t(450)); }

TEST(DeviceSm90Cases, WhyNotNamesTheReason) {
  const auto reason = [](const std::function<void(Case&)>& set, Pass pass = Pass::forward) {
    Case c;
    c.dtype = DType::bfloat16, c.head_dim = c.value_dim = 64, c.order = MemoryOrder::aligned;
    set(c);
    const char* said = sm90().why_not(build(c).problem(), pass);
    return std::string(said ? said : "");
  };
  EXPECT_EQ(reason([](Case&) {}), "");
  EXPECT_NE(reason([](Case&) {}, Pass::backward), "");
  EXPECT_NE(reason([](Case& c) { c.dtype = DType::float32; }).find("bfloat16"), std::string::npos);
  EXPECT_NE(reason([](Case& c) { c.head_dim = 264; }).find("256"), std::string::npos);
  EXPECT_NE(reason([](Case& c) { c.head_dim = 60; }).find("multiples of 16"), std::string::npos);
  EXPECT_NE(reason([](Case& c) { c.order = MemoryOrder::inner2; }).find("last stride"), std::string::npos);
  EXPECT_NE(reason([](Case& c) { c.order = MemoryOrder::contiguous; }).find("address"), std::string::npos);
  EXPECT_EQ(reason([](Case& c) { c.relative = RelativeKind::heads; }), "relative_bias is given");
  Case overlapping;  // every row begins with the second half of the one before
  overlapping.dtype = DType::bfloat16, overlapping.head_dim = overlapping.value_dim = 64;
  overlapping.order = MemoryOrder::aligned;
  const Built built = build(overlapping);
  for (TensorView Problem::*tensor : {&Problem::query, &Problem::key, &Problem::value}) {
    Problem p = built.problem();
    (p.*tensor).row_stride = 32;
    EXPECT_STREQ(sm90().why_not(p, Pass::forward), "a tensor's rows overlap");
  }
  EXPECT_NE(reason([](Case& c) { c.query_length = 4, c.key_length = 5000; }).find("few rows"), std::string::npos);
}

}  // namespace
}  // namespace scaledot::testing
