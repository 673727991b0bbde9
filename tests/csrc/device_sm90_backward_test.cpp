// The backward for sm_90, run on the host against the reference kernel in float64: short lengths, ragged lengths, and
// several tiles in both directions, with layouts that the copy engine can load.
#include "cuda/sm90/backward_tiles.h"
#include "device_check.h"
#include "kernel_cases.h"

namespace scaledot::testing {
namespace {

Case small_case(const std::string& name, DType dtype, int64_t queries, int64_t keys, int64_t dim) {
  Case c;
  c.name = name, c.dtype = dtype, c.order = MemoryOrder::aligned;
  c.batch = {1}, c.heads = c.kv_heads = 1, c.query_length = queries, c.key_length = keys;
  c.head_dim = c.value_dim = dim;
  return c;
}

const DeviceKernel& sm90_backward() {
  const DeviceKernelTable table = cuda_kernels();
  for (int k = 0; k < table.count; ++k)
    if (std::string(table.kernels[k].name) == "sm90") return table.kernels[k];
  throw std::runtime_error("cuda_kernels(): got no kernel 'sm90'; needs one");
}

// A case with gradients of its results, the input of a backward.
Built with_gradients(const Case& c) {
  Built b = build(c);
  add_gradients(b);
  return b;
}

// Run for each padded head dimension.
const std::vector<Feature>& backward_features() {
  static const std::vector<Feature> list = {
      {"plain", [](Case&) {}},
      {"one_tile", [](Case& c) { c.query_length = 64, c.key_length = 128; }},
      {"one_row", [](Case& c) { c.query_length = 1; }},
      {"one_key", [](Case& c) { c.key_length = 1; }},
      {"causal", [](Case& c) { c.causal = true, c.query_length = 200, c.key_length = 150; }},
      {"lower_right", [](Case& c) { c.causal = c.lower_right = true, c.key_length = 300; }},
      {"empty_rows", [](Case& c) { c.causal = c.lower_right = true, c.query_length = 150, c.key_length = 33; }},
      {"window",
       [](Case& c) {
         c.query_length = 130, c.key_length = 350, c.window_left = 33, c.window_right = 65, c.lower_right = true;
       }},
      {"window_diagonal", [](Case& c) { c.query_length = 300, c.window_left = c.window_right = 0; }},
      {"heads",
       [](Case& c) {
         c.batch = {2}, c.heads = 4, c.kv_heads = 2, c.query_length = 100, c.key_length = 200, c.causal = true;
       }},
      {"batches",
       [](Case& c) {
         c.batch = {2, 2}, c.query_length = 20, c.key_length = 30;
       }},
      {"expanded",
       [](Case& c) {
         c.batch = {2}, c.heads = c.kv_heads = 2, c.key_broadcast = {true, true, false, false};
       }},
      {"dims", [](Case& c) { c.head_dim -= 24, c.value_dim -= 40; }},
      {"large", [](Case& c) { c.spread = 6; }},
      {"scale_negative", [](Case& c) { c.scale = -0.4; }},
      {"softcap", [](Case& c) { c.softcap = 1.5, c.causal = true; }},
      {"alibi", [](Case& c) { c.alibi = AlibiKind::heads, c.heads = c.kv_heads = 2; }},
      {"bool_mask", [](Case& c) { c.mask = MaskKind::boolean, c.empty_rows = true; }},
      {"masked_score", [](Case& c) { c.mask = MaskKind::boolean, c.empty_rows = true, c.masked_score = -2.5; }},
      {"masked_fill", [](Case& c) { c.mask = MaskKind::boolean, c.empty_rows = true, c.masked_score = -1e9; }},
      {"inf_mask", [](Case& c) { c.mask = MaskKind::additive_with_inf, c.empty_rows = true; }},
      {"negative_mask", [](Case& c) { c.mask = MaskKind::additive, c.mask_offset = -150, c.query_length = 200; }},
      {"dropout", [](Case& c) { c.dropout_p = 0.3, c.key_length = 300; }},
      {"everything",
       [](Case& c) {
         c.batch = {2}, c.heads = 4, c.kv_heads = 2, c.mask = MaskKind::additive_with_inf,
         c.causal = c.lower_right = true;
         c.mask_broadcast.batch = true, c.window_left = 90, c.softcap = 3, c.alibi = AlibiKind::batch_heads;
         c.dropout_p = 0.2, c.scale = 0.3;
       }},
      {"nan_in_masked",
       [](Case& c) {
         c.mask = MaskKind::boolean, c.mask_broadcast = {false, true, true, false}, c.nan_in_masked = true;
       }},
      {"causal_nan_in_masked", [](Case& c) { c.causal = c.nan_in_masked = true; }},
      // More tiles to compute again than blocks.
      {"many_nan",
       [](Case& c) {
         c.batch = {2}, c.heads = c.kv_heads = 2, c.query_length = 140, c.causal = c.nan_in_masked = true;
       }},
      {"nan_in_live_query", [](Case& c) { c.nan_in_live_query = c.causal = true; }},
      {"nan_in_live_key", [](Case& c) { c.nan_in_live_key = true; }},
      {"inf_in_live_key", [](Case& c) { c.inf_in_live_key = true; }},
      {"nan_in_live_value", [](Case& c) { c.nan_in_live_value = c.causal = true; }},
      {"only_query", [](Case& c) { c.wants_key = c.wants_value = false; }},
      {"only_key_value", [](Case& c) { c.wants_query = false; }},
      // The gradient of a mask: with one element a score, and as sums; with tiles that positions skip.
      {"mask_causal",
       [](Case& c) {
         c.mask = MaskKind::additive, c.mask_dtype = DType::float32, c.causal = true, c.query_length = 140;
       }},
      {"mask_window",
       [](Case& c) {
         c.mask = MaskKind::additive_with_inf, c.query_length = 200, c.key_length = 200, c.window_left = 20,
         c.window_right = 10;
       }},
      {"mask_softcap_dropout",
       [](Case& c) { c.mask = MaskKind::additive, c.heads = 2, c.softcap = 2, c.dropout_p = 0.2; }},
      {"mask_of_heads",
       [](Case& c) {
         c.batch = {2}, c.heads = c.kv_heads = 2, c.mask = MaskKind::additive, c.mask_broadcast.batch = true;
       }},
      {"mask_of_keys",
       [](Case& c) {
         c.mask = MaskKind::additive_with_inf, c.mask_broadcast = {true, true, true, false}, c.causal = true;
       }},
      {"mask_of_rows", [](Case& c) { c.mask = MaskKind::additive, c.mask_broadcast.col = true; }},
      {"only_mask",
       [](Case& c) {
         c.mask = MaskKind::additive, c.causal = true, c.wants_query = c.wants_key = c.wants_value = false;
       }},
      {"mask_nan", [](Case& c) { c.mask = MaskKind::additive, c.causal = c.nan_in_live_query = true; }},
      {"mask_of_keys_nan",
       [](Case& c) {
         c.mask = MaskKind::additive, c.mask_broadcast = {true, true, true, false}, c.nan_in_live_key = true;
       }},
  };
  return list;
}

void add_case(std::vector<Case>& cases, const Feature& feature, DType dtype, int64_t head_dim, int64_t value_dim) {
  std::string name = std::string(feature.name) + "_" + std::to_string(head_dim);
  if (value_dim != head_dim) name.append("x").append(std::to_string(value_dim));
  Case c = small_case(name + "_" + dtype_name(dtype), dtype, 70, 140, head_dim);
  c.value_dim = value_dim;
  feature.set(c);
  cases.push_back(c);
}

std::vector<Case> backward_cases() {
  std::vector<Case> result;
  for (DType dtype : {DType::bfloat16, DType::float16})
    for (int64_t dim : {64, 128})
      for (const Feature& feature : backward_features()) add_case(result, feature, dtype, dim, dim);
  return result;
}

// 256 columns take the longest, so each feature runs in one of the two dtypes. With 192 columns, and values of 128, it
// runs in the other one. Then dimensions that are padded.
std::vector<Case> wide_cases() {
  std::vector<Case> result;
  size_t next = 0;
  for (const Feature& feature : backward_features()) {
    add_case(result, feature, next % 2 ? DType::bfloat16 : DType::float16, 256, 256);
    add_case(result, feature, next++ % 2 ? DType::float16 : DType::bfloat16, 192, 128);
  }
  constexpr int64_t kDims[][2] = {{136, 136}, {160, 160}, {192, 256}, {256, 40}, {64, 200}, {136, 72}};
  for (const auto& dims : kDims) {
    add_case(result, {"causal", [](Case& c) { c.causal = true; }}, next++ % 2 ? DType::bfloat16 : DType::float16,
             dims[0], dims[1]);
    add_case(result, {"dropout_gqa", [](Case& c) { c.heads = 2, c.dropout_p = 0.2; }},
             next++ % 2 ? DType::bfloat16 : DType::float16, dims[0], dims[1]);
  }
  return result;
}

class Sm90BackwardTest : public ::testing::TestWithParam<Case> {};

TEST_P(Sm90BackwardTest, AgreesWithReference) {
  const Case& c = GetParam();
  const Oracle oracle = solve_for_device(c);
  Built b = with_gradients(c);
  run(kReferenceKernel, b.problem(), Pass::forward);
  const DeviceKernel* selected = select_cuda(b.problem(), Pass::backward);
  ASSERT_EQ(selected, &sm90_backward()) << sm90_backward().why_not(b.problem(), Pass::backward);
  run_device(*selected, b, Pass::backward);
  expect_close("grad_value", b.grad_value, oracle.backward.grad_value, oracle.limits.grad_value);
  expect_close("grad_key", b.grad_key, oracle.backward.grad_key, oracle.limits.grad_key);
  expect_close("grad_query", b.grad_query, oracle.backward.grad_query, oracle.limits.grad_query);
  expect_close("grad_mask", b.grad_mask, oracle.backward.grad_mask, oracle.limits.grad_mask);
}

const auto name_of = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Cuda, Sm90BackwardTest, ::testing::ValuesIn(backward_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(CudaWide, Sm90BackwardTest, ::testing::ValuesIn(wide_cases()), name_of);

// Outputs that cannot be loaded 16 bytes at a time, or whose batch dimensions are not one in memory.
TEST(Sm90Backward, TakesOutputsOfAnyLayout) {
  const auto check = [](const Case& c, const std::vector<int64_t>& stored_batch, MemoryOrder order) {
    SCOPED_TRACE(int(order));
    const Oracle oracle = solve_for_device(c);
    Built b = with_gradients(c);
    const TestTensor output(c.dtype, stored_batch, c.heads, c.query_length, c.value_dim, order);
    Problem p = b.problem();
    p.output = output.view();
    run(kReferenceKernel, p, Pass::forward);
    ASSERT_EQ(select_cuda(p, Pass::backward), &sm90_backward());
    run_device(sm90_backward(), p, Pass::backward, [&] {
      for_each_tensor(b, true, register_tensor);
      register_tensor(output, false);
    });
    expect_close("grad_key", b.grad_key, oracle.backward.grad_key, oracle.limits.grad_key);
    expect_close("grad_query", b.grad_query, oracle.backward.grad_query, oracle.limits.grad_query);
  };
  for (int64_t dim : {64, 128}) {
    Case c = small_case("layout", DType::bfloat16, 70, 40, dim);
    c.batch = {2, 2}, c.heads = c.kv_heads = 2, c.causal = true;
    for (MemoryOrder order : {MemoryOrder::padded, MemoryOrder::inner2, MemoryOrder::transposed})
      check(c, c.batch, order);
    check(c, {2, 3}, MemoryOrder::aligned);
    c.value_dim -= 8;  // the last lanes have no columns
    check(c, c.batch, MemoryOrder::padded);
  }
}

// docs/gpu_kernels.md says so. clear_mask_kernel is the fifth of a causal call with the gradient of a mask.
TEST(Sm90Backward, HasFourLaunches) {
  const auto launches = [](const std::function<void(Case&)>& set) {
    Case c = small_case("launches", DType::bfloat16, 70, 140, 64);
    set(c);
    Built b = with_gradients(c);
    run(kReferenceKernel, b.problem(), Pass::forward);
    const int64_t before = sim::launches();
    run_device(sm90_backward(), b, Pass::backward);
    return sim::launches() - before;
  };
  EXPECT_EQ(launches([](Case&) {}), 4);
  EXPECT_EQ(launches([](Case& c) { c.causal = true; }), 4);
  EXPECT_EQ(launches([](Case& c) { c.mask = MaskKind::boolean; }), 4);
  EXPECT_EQ(launches([](Case& c) { c.wants_query = false; }), 3);
  EXPECT_EQ(launches([](Case& c) { c.mask = MaskKind::additive, c.causal = true; }), 5);
}

// Which problems it leaves to the generic kernels, with which reason.
TEST(Sm90Backward, WhyNotNamesTheReason) {
  const std::vector<std::pair<const char*, std::function<void(Case&)>>> list = {
      {"bfloat16 and float16", [](Case& c) { c.dtype = DType::float32; }},
      {"above 256", [](Case& c) { c.head_dim = 264; }},
      {"above 256", [](Case& c) { c.value_dim = 300; }},
      {"broadcast attn_mask",
       [](Case& c) {
         c.mask = MaskKind::additive, c.mask_broadcast.row = true;
         c.wants_query = c.wants_key = c.wants_value = false;
       }},
      {"no keys", [](Case& c) { c.key_length = 0; }},
      {"no queries", [](Case& c) { c.query_length = 0; }},
      {"weights", [](Case& c) { c.return_weights = true; }},
      {"grad_output", [](Case& c) { c.grad_output = false; }},
      {"multiple of 16 bytes", [](Case& c) { c.order = MemoryOrder::padded; }},
      {"last stride", [](Case& c) { c.order = MemoryOrder::inner2; }},
      {"last stride", [](Case& c) { c.order = MemoryOrder::transposed; }},
      {"multiples of 16 bytes", [](Case& c) { c.head_dim = 60; }},
  };
  for (const auto& [reason, set] : list) {
    Case c = small_case(reason, DType::bfloat16, 20, 30, 64);
    set(c);
    const Built b = with_gradients(c);
    const char* said = sm90_backward().why_not(b.problem(), Pass::backward);
    ASSERT_NE(said, nullptr) << reason;
    EXPECT_NE(std::string(said).find(reason), std::string::npos) << said;
  }
  const Built b = with_gradients(small_case("taken", DType::bfloat16, 20, 30, 64));
  for (int capability : {80, 89, 100}) {
    sim::set_device({capability, true});
    EXPECT_STREQ(sm90_backward().why_not(b.problem(), Pass::backward), "the GPU's compute capability is not 9.0");
  }
  sim::set_device(sim::kDevice);
  EXPECT_EQ(sm90_backward().why_not(b.problem(), Pass::backward), nullptr);
}

// ---------------------------------------------------------------------------------------------------- by the compiler
template <class C>
constexpr bool fits() {
  return sizeof(Sm90BackwardShared<C>) <= size_t(sim::kMaxSharedBytes) &&
         128 * (C::kProducerRegisters + C::kConsumers * C::kConsumerRegisters) <= 65536;
}
static_assert(fits<Sm90BackwardConfig<BFloat16, 64, 64, true>>() &&
              fits<Sm90BackwardConfig<BFloat16, 128, 128, true>>());
static_assert(fits<Sm90BackwardConfig<BFloat16, 256, 256, true>>() &&
              fits<Sm90BackwardConfig<BFloat16, 256, 256, false>>());
static_assert(fits<Sm90BackwardConfig<BFloat16, 192, 128, true>>());

// The consumers' threads hold every score of a tile once.
template <class C>
constexpr bool scores_are_held_once() {
  bool seen[C::kRows][C::kKeys] = {};
  int held = 0;
  for (int thread = 0; thread < 128 * C::kConsumers; ++thread)
    for (int part = 0; part < C::kRowParts; ++part) {
      const Sm90BackwardLayout layout = backward_layout_of<C>(thread, thread / 128, part);
      for (int e = 0; e < C::kScores; ++e, ++held) {
        bool& here = seen[layout.row(e / 4, e % 2)][layout.key(e / 2 % 2)];
        if (here) return false;
        here = true;
      }
    }
  return held == C::kRows * C::kKeys;
}
static_assert(scores_are_held_once<Sm90BackwardConfig<BFloat16, 64, 64, true>>());
static_assert(scores_are_held_once<Sm90BackwardConfig<BFloat16, 128, 128, true>>());
static_assert(scores_are_held_once<Sm90BackwardConfig<BFloat16, 256, 256, true>>());

// The numbers of a thread's rows are side by side: four at quad's place of every 16 rows.
template <class C>
constexpr bool row_numbers_are_in_order() {
  for (int thread = 0; thread < 128 * C::kConsumers; ++thread)
    for (int part = 0; part < C::kRowParts; ++part) {
      const Sm90BackwardLayout layout = backward_layout_of<C>(thread, thread / 128, part);
      for (int n = 0; n < C::kScores / 4; ++n)
        for (int j = 0; j < 2; ++j)
          if (statistics_place(layout.row(n, j)) != layout.first_row + n / 2 * 16 + 4 * layout.quad + 2 * (n % 2) + j)
            return false;
    }
  return true;
}
static_assert(row_numbers_are_in_order<Sm90BackwardConfig<BFloat16, 64, 64, false>>());
static_assert(row_numbers_are_in_order<Sm90BackwardConfig<BFloat16, 128, 128, false>>());
static_assert(row_numbers_are_in_order<Sm90BackwardConfig<BFloat16, 256, 256, false>>());

// Every element of a warpgroup's rows of grad_query has one position.
template <int kGradQueryCols>
constexpr bool grad_query_positions_are_unique() {
  bool seen[kWgmmaRows][kGradQueryCols] = {};
  for (int thread = 0; thread < 128; ++thread)
    for (int group = 0; group < kGradQueryCols / 8; ++group)
      for (int e = 0; e < 4; ++e) {
        const GradQueryPosition at = grad_query_position(thread, group, e);
        if (seen[at.row][at.col]) return false;
        seen[at.row][at.col] = true;
      }
  return 128 * kGradQueryCols / 8 * 4 == kWgmmaRows * kGradQueryCols;
}
static_assert(grad_query_positions_are_unique<64>() && grad_query_positions_are_unique<128>());

// The row tiles that a key tile visits, the order in which key tiles add to grad_query, and which elements are live,
// against tile_kind and attends.
void check_tiles(const Problem& p, int tile_rows, int tile_keys) {
  std::vector<int64_t> next(size_t(ceil_div(p.query_length, tile_rows)), -1);
  const int64_t tiles = ceil_div(p.key_length, tile_keys);
  for (int64_t turn = 0; turn < tiles; ++turn) {
    const int64_t tile = tiles - 1 - turn;
    ASSERT_EQ(backward_turn(tiles, tile), turn);
    const Range of_keys = backward_keys(p, tile, tile_keys), visited = backward_row_tiles(p, of_keys, tile_rows);
    for (int64_t m = 0; m < int64_t(next.size()); ++m) {
      const Range rows = backward_rows(p, m, tile_rows);
      const bool visits = visited.begin <= m && m < visited.end;
      ASSERT_EQ(visits, tile_kind(p, rows, of_keys) != TileKind::skip);
      if (!visits) continue;
      int64_t& semaphore = next[size_t(m)];
      if (semaphore < 0) semaphore = backward_first_turn(p, rows, tile_keys);
      ASSERT_EQ(semaphore++, turn);
      const int first_row = int(rows.begin), count = int(rows.end - rows.begin);
      const LiveBand band = band_of_rows(backward_band(p, of_keys, tile_rows), first_row, count);
      int64_t live = 0;
      for (int i = 0; i < tile_rows; ++i)
        for (int j = 0; j < tile_keys; ++j) {
          const bool inside = i < count && of_keys.begin + j < of_keys.end;
          const bool wanted = inside && attends(p, rows.begin + i, of_keys.begin + j);
          ASSERT_EQ(in_band(band, i, j), wanted);
          live += wanted;
        }
      ASSERT_EQ(band_is_whole(band, tile_rows, tile_keys), live == tile_rows * tile_keys);
    }
  }
}

TEST(Sm90Backward, RowTilesOrderAndBandsAgreeWithSingleScores) {
  for (int64_t queries : {1, 64, 65, 200, 500})
    for (int64_t keys : {1, 128, 129, 400})
      for (int64_t diagonal : {int64_t(0), keys - queries, int64_t(-70), int64_t(90)})
        for (int64_t left : {int64_t(0), int64_t(40), kUnbounded})
          for (int64_t right : {int64_t(0), int64_t(100), kUnbounded}) {
            Problem p = {};
            p.query_length = queries, p.key_length = keys;
            p.position = {diagonal, left, right};
            for (int head_dim : {64, 128, 256}) {
              const Sm90BackwardTileSizes sizes = sm90_backward_tile_sizes(head_dim, head_dim);
              ASSERT_NO_FATAL_FAILURE(check_tiles(p, sizes.rows, sizes.keys));
            }
          }
}

}  // namespace
}  // namespace scaledot::testing
