// The generic GPU kernels, forward and backward, run on the host against the reference kernel in float64.
#include "cuda/archs.h"
#include "device_check.h"
#include "kernel_cases.h"

namespace scaledot::testing {
namespace {

class DeviceKernels : public ::testing::TestWithParam<Case> {};

const DeviceKernel& generic() {
  const DeviceKernelTable table = cuda_kernels();
  int k = 0;
  while (std::string(table.kernels[k].name) != "generic") ++k;
  return table.kernels[k];
}

TEST_P(DeviceKernels, AgreesWithReference) { EXPECT_TRUE(check_device_kernel(generic(), GetParam())); }

// One row and many keys.
void decode(Case& c) {
  c.batch = {2}, c.heads = c.kv_heads = 2, c.query_length = 1, c.key_length = 1100, c.head_dim = c.value_dim = 64;
  c.lower_right = true;
}

// Cases for code that the common cases do not reach: 16-byte copies, several panels of columns, split keys in every
// variant, and slices of the sums over a mask's broadcast dimensions.
std::vector<Case> device_cases() {
  const std::vector<Feature> list = {
      {"aligned", [](Case& c) { c.head_dim = c.value_dim = 64, c.query_length = 70, c.key_length = 150; }},
      {"aligned_causal_ragged",
       [](Case& c) {
         c.head_dim = 72, c.value_dim = 40, c.query_length = 70, c.key_length = 150;
         c.causal = c.lower_right = c.nan_in_masked = true;
       }},
      {"aligned_panel",
       [](Case& c) {
         c.batch = {1}, c.head_dim = c.value_dim = 128, c.query_length = 70, c.key_length = 80, c.return_weights = true;
       }},
      {"panels",
       [](Case& c) {
         c.batch = {1}, c.heads = c.kv_heads = 1, c.head_dim = 320, c.value_dim = 200, c.query_length = 66;
         c.key_length = 70, c.causal = c.lower_right = c.nan_in_masked = c.return_weights = true;
       }},
      {"panels_of_value", [](Case& c) { c.batch = {1}, c.heads = c.kv_heads = 1, c.head_dim = 33, c.value_dim = 300; }},
      {"panels_of_key", [](Case& c) { c.batch = {1}, c.heads = c.kv_heads = 1, c.head_dim = 300, c.value_dim = 33; }},
      {"head_dim_512",
       [](Case& c) {
         c.batch = {1}, c.heads = c.kv_heads = 1, c.head_dim = c.value_dim = 512, c.query_length = 20,
         c.key_length = 70;
         c.mask = MaskKind::additive_with_inf, c.mask_broadcast = {true, true, true, false};
       }},
      {"mla",
       [](Case& c) {
         c.batch = {1}, c.heads = 20, c.kv_heads = 1, c.head_dim = 576, c.value_dim = 512, c.query_length = 2;
         c.key_length = 90, c.causal = c.lower_right = true;
       }},
      {"split_everything",
       [](Case& c) {
         c.batch = {1}, c.heads = 4, c.kv_heads = 2, c.query_length = 3, c.key_length = 1100, c.head_dim = 40;
         c.value_dim = 136, c.mask = MaskKind::additive_with_inf, c.causal = c.lower_right = c.nan_in_masked = true;
         c.softcap = 4, c.dropout_p = 0.2, c.return_weights = true, c.alibi = AlibiKind::heads;
       }},
      {"split_empty_rows",
       [](Case& c) {
         c.batch = {1}, c.query_length = 3, c.key_length = 1100, c.mask = MaskKind::boolean, c.empty_rows = true;
         c.window_left = 300, c.lower_right = true, c.return_weights = true;
       }},
      {"split_masked_fill",
       [](Case& c) {
         c.batch = {1}, c.query_length = 3, c.key_length = 1100, c.mask = MaskKind::boolean, c.empty_rows = true;
         c.masked_score = -1e9;
       }},
      {"split_nan",
       [](Case& c) { c.batch = {1}, c.query_length = 3, c.key_length = 1100, c.nan_in_live_key = c.causal = true; }},
      {"mask_slices",
       [](Case& c) {
         c.batch = {2, 2}, c.heads = 4, c.kv_heads = 2, c.query_length = 70, c.key_length = 140;
         c.mask = MaskKind::additive, c.mask_broadcast = {true, true, true, false}, c.dropout_p = 0.1;
       }},
      {"mask_one_element",
       [](Case& c) {
         c.query_length = 70, c.key_length = 140, c.mask = MaskKind::additive,
         c.mask_broadcast = {true, true, true, true};
       }},
      {"relative_slices",
       [](Case& c) {
         c.batch = {2, 2}, c.heads = 4, c.kv_heads = 2, c.query_length = 70, c.key_length = 140, c.dropout_p = 0.1;
         c.relative = RelativeKind::heads, c.relative_range = {-50, 100}, c.mask = MaskKind::additive;
       }},
      {"relative_one_entry",
       [](Case& c) {
         c.query_length = 70, c.key_length = 140, c.relative = RelativeKind::shared, c.relative_range = {3, 3};
       }},
      {"decode_plain", [](Case& c) { decode(c), c.head_dim = c.value_dim = 128; }},
      {"decode_narrow",
       [](Case& c) {
         decode(c), c.batch = {2, 2}, c.heads = 3, c.kv_heads = 1;
       }},
      {"decode_of_sixteen",
       [](Case& c) {
         decode(c), c.heads = 16, c.kv_heads = 1, c.key_length = 530, c.order = MemoryOrder::aligned_blhd;
       }},
      {"decode_mla",
       [](Case& c) {
         decode(c), c.batch = {1}, c.heads = 16, c.kv_heads = 1, c.key_length = 530, c.head_dim = 576;
         c.value_dim = 512;
       }},
      {"decode_of_two_tiles",
       [](Case& c) {
         decode(c), c.heads = 8, c.kv_heads = 2, c.query_length = 7, c.key_length = 521, c.causal = true;
       }},
      {"decode_window",
       [](Case& c) {
         decode(c), c.query_length = 5, c.head_dim = 128, c.window_left = 700, c.nan_in_masked = c.causal = true;
       }},
      {"decode_unaligned",
       [](Case& c) { decode(c), c.head_dim = 72, c.value_dim = 40, c.order = MemoryOrder::inner2, c.softcap = 3; }},
      {"decode_ragged",
       [](Case& c) { decode(c), c.head_dim = 72, c.value_dim = 40, c.query_length = 2, c.alibi = AlibiKind::heads; }},
      {"decode_panels",
       [](Case& c) {
         decode(c), c.head_dim = 300, c.value_dim = 140, c.heads = c.kv_heads = 1, c.query_length = 2;
         c.mask = MaskKind::boolean, c.nan_in_masked = true;
       }},
      {"decode_dropout", [](Case& c) { decode(c), c.dropout_p = 0.4, c.return_weights = true; }},
      {"decode_part",
       [](Case& c) { decode(c), c.dropout_p = 0.4, c.part = {true, 5, 77, 1, 3, 20}, c.alibi = AlibiKind::heads; }},
      {"decode_bias",
       [](Case& c) {
         decode(c), c.query_length = 3, c.heads = 4, c.kv_heads = 2, c.relative = RelativeKind::heads;
         c.relative_range = {-500, 10}, c.relative_low = -kInfinity, c.nan_in_masked = true;
       }},
      {"decode_mask",
       [](Case& c) {
         decode(c), c.query_length = 3, c.mask = MaskKind::additive_with_inf, c.mask_broadcast.head = true;
         c.empty_rows = c.nan_in_masked = true;
       }},
      {"decode_finite_mask", [](Case& c) { decode(c), c.mask = MaskKind::additive, c.nan_in_live_value = true; }},
      {"decode_blocks",
       [](Case& c) {
         decode(c), c.heads = 4, c.query_length = 3, c.block_rows = 2, c.block_keys = 48, c.nan_in_masked = true;
       }},
      {"decode_nan", [](Case& c) { decode(c), c.query_length = 9, c.nan_in_live_key = c.causal = true; }},
      {"decode_large", [](Case& c) { decode(c), c.spread = 300, c.mask = MaskKind::boolean, c.masked_score = -1e9; }},
      {"stacked_heads",
       [](Case& c) {
         c.heads = 12, c.kv_heads = 2, c.query_length = 11, c.key_length = 100, c.causal = c.lower_right = true;
         c.mask = MaskKind::additive, c.dropout_p = 0.3, c.return_weights = true;
       }},
  };
  std::vector<Case> result;
  for (const Feature& feature : list)
    for (DType dtype : kDTypes) {
      Case c;
      c.name = std::string(feature.name) + "_" + dtype_name(dtype);
      c.dtype = dtype, c.order = MemoryOrder::aligned;
      feature.set(c);
      result.push_back(c);
    }
  return result;
}

// Numbers of rows of a KV group around those that a tile has, and that Decode takes; the keys are split.
std::vector<Case> decode_cases() {
  struct Rows {
    int64_t heads, of_head;  // of a KV group
  };
  std::vector<Case> result;
  for (const Rows rows : {Rows{2, 1}, {1, 2}, {3, 5}, {2, 8}, {17, 1}, {1, 17}, {1, 31}, {8, 4}, {32, 1}, {3, 11}})
    for (DType dtype : {DType::bfloat16, DType::float16}) {
      Case c;
      c.name =
          "decode_rows_" + std::to_string(rows.heads) + "x" + std::to_string(rows.of_head) + "_" + dtype_name(dtype);
      c.dtype = dtype, c.order = MemoryOrder::aligned;
      decode(c), c.batch = {1}, c.heads = 2 * rows.heads, c.query_length = rows.of_head, c.key_length = 530;
      c.causal = c.nan_in_masked = true;
      result.push_back(c);
    }
  return result;
}

TEST(DeviceTable, RefusesUnsupportedGpus) {
  const Built b = build(Case());
  for (const sim::Device device : {sim::Device{75, true}, sim::Device{100, false}, sim::Device{0, false}}) {
    sim::set_device(device);
    const char* reason = generic().why_not(b.problem(), Pass::forward);
    EXPECT_EQ(select_cuda(b.problem(), Pass::forward), nullptr);
    sim::set_device(sim::kDevice);
    ASSERT_NE(reason, nullptr);
    EXPECT_NE(std::string(reason).find(device.capability < 80 ? "compute capability 8.0" : "TORCH_CUDA_ARCH_LIST"),
              std::string::npos)
        << reason;
  }
}

TEST(DeviceTable, KnowsWhichGpusHaveMachineCode) {
  const char* archs = "sm_80;compute_80;sm_90a;sm_100;sm_120f";
  for (int capability : {80, 86, 89, 90, 100, 103, 120, 121}) EXPECT_TRUE(has_machine_code(archs, capability));
  for (int capability : {0, 70, 75, 110, 130}) EXPECT_FALSE(has_machine_code(archs, capability));
  EXPECT_FALSE(has_machine_code("sm_90a", 91) || has_machine_code("sm_86", 80) || has_machine_code("compute_90", 90));
  EXPECT_FALSE(has_machine_code("", 90));
  EXPECT_EQ(device_capability(), sim::kDevice.capability);
}

const auto name_of = [](const auto& info) { return "generic_" + info.param.name; };
INSTANTIATE_TEST_SUITE_P(CudaOwn, DeviceKernels, ::testing::ValuesIn(device_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(CudaDecode, DeviceKernels, ::testing::ValuesIn(decode_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(CudaMean, DeviceKernels, ::testing::ValuesIn(average_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceKernels, ::testing::ValuesIn(cases()), name_of);

}  // namespace
}  // namespace scaledot::testing
