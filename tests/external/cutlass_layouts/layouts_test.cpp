// The layouts that csrc/cuda/ptx and the simulated GPU share, against those of CuTe, the layout library of CUTLASS.
//
// Our wrappers and the simulation read the same tables of the PTX ISA, so a table that was misread would be wrong in
// both. CuTe's authors read them too. Its headers run on the host: here they place matrices in the simulated GPU's
// shared memory, and say which element each register of each thread holds.
#include "device_sim_sm90.h"

#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/stmatrix.h"

// CuTe asks this for addresses in shared memory.
static size_t __cvta_generic_to_shared(const void* address) { return scaledot::sim::shared_address(address); }
#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1

#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/copy_traits_sm90.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

namespace scaledot {
namespace {

using cute::Int;
namespace gmma = cute::SM90::GMMA;

constexpr int kDepth = 64;  // of the matrices in shared memory: four steps of 16
constexpr int kStep = 16;
constexpr int kPanelOf = 64;  // elements in a row of a panel

template <class Number>
using CuteNumber = std::conditional_t<std::is_same_v<Number, BFloat16>, cute::bfloat16_t, cute::half_t>;

// Small integers, which both types hold exactly.
float a_at(int m, int k) { return float((3 * m + 7 * k) % 13 - 6); }
float b_at(int n, int k) { return float((5 * n + 11 * k) % 17 - 8); }

template <class Number>
uint16_t bits_of(float x) {
  Number number;
  narrow(x, number);
  return number.bits;
}

// An operand of mn x kDepth elements in shared memory, as CuTe has it for wgmma with 128-byte swizzle. Atoms are in
// the order of our panels: all rows of a panel, then the next panel.
template <class Number, Major kMajor, int kMn>
auto cute_operand(char* place) {
  using T = CuteNumber<Number>;
  const auto pointer = cute::make_smem_ptr(reinterpret_cast<T*>(place));
  if constexpr (kMajor == Major::k)
    return cute::make_tensor(pointer,
                             cute::tile_to_shape(gmma::Layout_K_SW128_Atom<T>{}, cute::Shape<Int<kMn>, Int<kDepth>>{}));
  else
    return cute::make_tensor(pointer,
                             cute::tile_to_shape(gmma::Layout_MN_SW128_Atom<T>{}, cute::Shape<Int<kMn>, Int<kDepth>>{},
                                                 cute::Step<cute::_2, cute::_1>{}));
}

// The place of element (mn, k) in our panels.
template <Major kMajor, int kMn>
int panel_byte(int mn, int k) {
  const int row = kMajor == Major::k ? mn : k, col = kMajor == Major::k ? k : mn;
  const int panel_bytes = (kMajor == Major::k ? kMn : kDepth) * kPanelOf * 2;
  return col / kPanelOf * panel_bytes + swizzled_byte(row, col % kPanelOf * 2);
}

// Our descriptor of the 16 k from `k` on.
template <Major kMajor, int kMn>
uint64_t our_descriptor(const char* place, int k) {
  if (kMajor == Major::k)
    return advance_descriptor(k_major_descriptor(place), k / kPanelOf * kMn * kPanelOf * 2 + k % kPanelOf * 2);
  return advance_descriptor(mn_major_descriptor(place, kDepth * kPanelOf * 2), k * kPanelOf * 2);
}

template <Major kMajor>
constexpr gmma::Major kCuteMajor = kMajor == Major::k ? gmma::Major::K : gmma::Major::MN;

// Writes an operand to shared memory where CuTe says.
template <class Number, Major kMajor, int kMn, class At>
void fill(char* place, const At& at) {
  const auto tensor = cute_operand<Number, kMajor, kMn>(place);
  for (int mn = thread_index(); mn < kMn; mn += kWarpgroupThreads)
    for (int k = 0; k < kDepth; ++k)
      shared_store(reinterpret_cast<Number*>(&tensor(mn, k)), Number{bits_of<Number>(at(mn, k))});
}

// The operands are read by the tensor cores from here on.
void end_fill() {
  fence_async();
  barrier();
}

class CuteLayouts : public ::testing::Test {
 protected:
  void TearDown() override { sim::clear_buffers(); }
};

// ---------------------------------------------------------------------------------------------------- shared memory
template <class Number, Major kMajor, int kMn>
void expect_places_and_descriptors() {
  expect_right([] {
    char* place = shared_bytes();
    require(reinterpret_cast<uintptr_t>(place) % kSwizzleAtomBytes == 0);
    const auto tensor = cute_operand<Number, kMajor, kMn>(place);
    for (int mn = thread_index(); mn < kMn; mn += kWarpgroupThreads)
      for (int k = 0; k < kDepth; ++k)
        require(reinterpret_cast<const char*>(&tensor(mn, k)) - place == panel_byte<kMajor, kMn>(mn, k));
    cute::for_each(cute::make_int_sequence<kDepth / kStep>{}, [&](auto step) {
      const auto tile = cute::local_tile(tensor, cute::Shape<Int<kMn>, Int<kStep>>{}, cute::make_coord(Int<0>{}, step));
      const uint64_t theirs = gmma::make_gmma_desc<kCuteMajor<kMajor>>(tile);
      const uint64_t ours = our_descriptor<kMajor, kMn>(place, decltype(step)::value * kStep);
      // One panel along m or n: nothing is a leading offset away.
      constexpr uint64_t kLeading = uint64_t(0x3fff) << 16;
      const uint64_t read = kMajor == Major::mn && kMn == kPanelOf ? ~kLeading : ~uint64_t(0);
      require((theirs & read) == (ours & read));
    });
  });
}
TEST_F(CuteLayouts, PlacesAndDescriptorsOfKMajorOperands) {
  expect_places_and_descriptors<BFloat16, Major::k, 32>();
  expect_places_and_descriptors<BFloat16, Major::k, 64>();
  expect_places_and_descriptors<BFloat16, Major::k, 80>();
  expect_places_and_descriptors<BFloat16, Major::k, 128>();
  expect_places_and_descriptors<BFloat16, Major::k, 256>();
  expect_places_and_descriptors<Float16, Major::k, 32>();
  expect_places_and_descriptors<Float16, Major::k, 64>();
  expect_places_and_descriptors<Float16, Major::k, 80>();
  expect_places_and_descriptors<Float16, Major::k, 128>();
  expect_places_and_descriptors<Float16, Major::k, 256>();
}
TEST_F(CuteLayouts, PlacesAndDescriptorsOfMnMajorOperands) {
  expect_places_and_descriptors<BFloat16, Major::mn, 64>();
  expect_places_and_descriptors<BFloat16, Major::mn, 128>();
  expect_places_and_descriptors<BFloat16, Major::mn, 256>();
  expect_places_and_descriptors<Float16, Major::mn, 64>();
  expect_places_and_descriptors<Float16, Major::mn, 128>();
  expect_places_and_descriptors<Float16, Major::mn, 256>();
}

// A box that the copy engine loads is where CuTe has it.
TEST_F(CuteLayouts, BoxesOfTheCopyEngine) {
  const Matrix matrix(64, kDepth, 3, 64);
  expect_right([&] {
    make_mbarriers({1});
    matrix.load(shared_bytes(), mbarrier(0));
    mbarrier_wait(mbarrier(0), 0);
    const auto tensor = cute_operand<BFloat16, Major::k, 64>(shared_bytes());
    for (int row = thread_index(); row < 64; row += kWarpgroupThreads)
      for (int k = 0; k < kDepth; ++k)
        require(widen(shared_load(reinterpret_cast<const BFloat16*>(&tensor(row, k)))) == matrix.at(row, k));
  });
}

// ---------------------------------------------------------------------------------------------------- wgmma
// The product of all steps, from the sums in the registers that CuTe says.
template <int kN>
void require_product(const float (&d)[kN / 2]) {
  const gmma::CLayout_64xN<kN> element;  // (thread, register) -> row + 64 column
  for (int r = 0; r < kN / 2; ++r) {
    const int at = int(element(thread_index(), r)), row = at % 64, col = at / 64;
    float sum = 0;
    for (int k = 0; k < kDepth; ++k) sum += a_at(row, k) * b_at(col, k);
    require(d[r] == sum);
  }
}

template <class Number, Major kA, Major kB, int kN>
void expect_product_from_shared_memory() {
  expect_right([] {
    char *a = shared_bytes(), *b = a + 64 * kDepth * 2;
    fill<Number, kA, 64>(a, a_at);
    fill<Number, kB, kN>(b, b_at);
    end_fill();
    float d[kN / 2];
    wgmma_fence();
    for (int k = 0; k < kDepth; k += kStep)
      wgmma<kN, kA, kB>(d, our_descriptor<kA, 64>(a, k), our_descriptor<kB, kN>(b, k), k > 0, Type<Number>{});
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(d);
    require_product<kN>(d);
  });
}

template <class Number, Major kB, int kN>
void expect_product_from_registers() {
  expect_right([] {
    char* b = shared_bytes();
    fill<Number, kB, kN>(b, b_at);
    end_fill();
    const gmma::ALayout_64x16 element;  // (thread, number in the registers) -> row + 64 k
    uint32_t a[kDepth / kStep][4] = {};
    for (int step = 0; step < kDepth / kStep; ++step)
      for (int e = 0; e < 8; ++e) {
        const int at = int(element(thread_index(), e));
        a[step][e / 2] |= uint32_t(bits_of<Number>(a_at(at % 64, step * kStep + at / 64))) << (16 * (e % 2));
      }
    float d[kN / 2];
    fence_operand(a);
    wgmma_fence();
    for (int step = 0; step < kDepth / kStep; ++step)
      wgmma<kN, kB>(d, a[step], our_descriptor<kB, kN>(b, step * kStep), step > 0, Type<Number>{});
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(d);
    require_product<kN>(d);
  });
}

template <class Number, int kN>
void expect_products_of_width() {
  expect_product_from_shared_memory<Number, Major::k, Major::k, kN>();
  expect_product_from_shared_memory<Number, Major::mn, Major::k, kN>();
  expect_product_from_registers<Number, Major::k, kN>();
  if constexpr (kN % kPanelOf == 0) {  // an MN-major operand is whole panels
    expect_product_from_shared_memory<Number, Major::k, Major::mn, kN>();
    expect_product_from_shared_memory<Number, Major::mn, Major::mn, kN>();
    expect_product_from_registers<Number, Major::mn, kN>();
  }
}
template <class Number>
void expect_products() {
  expect_products_of_width<Number, 32>();
  expect_products_of_width<Number, 64>();
  expect_products_of_width<Number, 80>();
  expect_products_of_width<Number, 128>();
  expect_products_of_width<Number, 256>();
}
TEST_F(CuteLayouts, WgmmaOfBFloat16) { expect_products<BFloat16>(); }
TEST_F(CuteLayouts, WgmmaOfFloat16) { expect_products<Float16>(); }

// ---------------------------------------------------------------------------------------------------- warps
template <class Number, class Operation>
void expect_mma() {
  using Traits = cute::MMA_Traits<Operation>;
  expect_right(
      [] {
        const typename Traits::ALayout a_element;  // -> row + 16 k
        const typename Traits::BLayout b_element;  // -> column + 8 k
        const typename Traits::CLayout c_element;  // -> row + 16 column
        const int lane = lane_index();
        uint32_t a[4] = {}, b[2] = {};
        for (int e = 0; e < 8; ++e) {
          const int at = int(a_element(lane, e));
          a[e / 2] |= uint32_t(bits_of<Number>(a_at(at % 16, at / 16))) << (16 * (e % 2));
        }
        for (int e = 0; e < 4; ++e) {
          const int at = int(b_element(lane, e));
          b[e / 2] |= uint32_t(bits_of<Number>(b_at(at % 8, at / 8))) << (16 * (e % 2));
        }
        float c[4] = {};
        mma_m16n8k16(c, a, b[0], b[1], Type<Number>{});
        for (int e = 0; e < 4; ++e) {
          const int at = int(c_element(lane, e)), row = at % 16, col = at / 16;
          require(row == mma_row(lane, e) && col == mma_column(lane, e));
          float sum = 0;
          for (int k = 0; k < kStep; ++k) sum += a_at(row, k) * b_at(col, k);
          require(c[e] == sum);
        }
      },
      32);
}
TEST_F(CuteLayouts, MmaOfBFloat16) { expect_mma<BFloat16, cute::SM80_16x8x16_F32BF16BF16F32_TN>(); }
TEST_F(CuteLayouts, MmaOfFloat16) { expect_mma<Float16, cute::SM80_16x8x16_F32F16F16F32_TN>(); }

// ldmatrix and stmatrix. CuTe numbers the bits that move, in the memory that a lane points to and in registers. Element
// 8 lane + e of memory is element e of the row that the lane points to.

template <class Layout>
int element_number(const Layout& layout, int lane, int e) {
  return int(layout(lane, 16 * e)) / 16;
}

template <class Operation>
void expect_load(bool transposed) {
  using Traits = cute::Copy_Traits<Operation>;
  expect_right(
      [=] {
        auto* row = reinterpret_cast<BFloat16*>(shared_bytes()) + 8 * lane_index();
        for (int e = 0; e < 8; ++e)
          shared_store(row + e, BFloat16{uint16_t(element_number(typename Traits::SrcLayout{}, lane_index(), e))});
        warp_barrier();
        uint32_t r[4];
        transposed ? ldmatrix_x4_trans(r, row) : ldmatrix_x4(r, row);
        for (int e = 0; e < 8; ++e)
          require(int(r[e / 2] >> (16 * (e % 2)) & 0xffff) ==
                  element_number(typename Traits::DstLayout{}, lane_index(), e));
      },
      32);
}
template <class Operation>
void expect_store(bool transposed) {
  using Traits = cute::Copy_Traits<Operation>;
  expect_right(
      [=] {
        auto* row = reinterpret_cast<BFloat16*>(shared_bytes()) + 8 * lane_index();
        uint32_t r[4] = {};
        for (int e = 0; e < 8; ++e)
          r[e / 2] |= uint32_t(element_number(typename Traits::SrcLayout{}, lane_index(), e)) << (16 * (e % 2));
        transposed ? stmatrix_x4_trans(row, r) : stmatrix_x4(row, r);
        warp_barrier();
        for (int e = 0; e < 8; ++e)
          require(int(shared_load(row + e).bits) == element_number(typename Traits::DstLayout{}, lane_index(), e));
      },
      32);
}
TEST_F(CuteLayouts, Ldmatrix) { expect_load<cute::SM75_U32x4_LDSM_N>(false); }
TEST_F(CuteLayouts, LdmatrixTransposed) { expect_load<cute::SM75_U16x8_LDSM_T>(true); }
TEST_F(CuteLayouts, Stmatrix) { expect_store<cute::SM90_U32x4_STSM_N>(false); }
TEST_F(CuteLayouts, StmatrixTransposed) { expect_store<cute::SM90_U16x8_STSM_T>(true); }

}  // namespace
}  // namespace scaledot
