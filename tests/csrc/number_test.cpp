// core/number.h: every bit pattern of 8 and 16 bits, and rounding next to each of 16, against double arithmetic.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "reference.h"

namespace scaledot {
namespace {

struct Format {
  int exponent_bits, mantissa_bits;
};
template <class Storage>
constexpr Format kFormat = {8, 7};
template <>
constexpr Format kFormat<Float16> = {5, 10};

// The value of a bit pattern (IEEE 754, section 3.4).
template <class Storage>
double meaning(uint16_t bits) {
  constexpr Format f = kFormat<Storage>;
  const int bias = (1 << (f.exponent_bits - 1)) - 1, exponent = bits >> f.mantissa_bits & ((1 << f.exponent_bits) - 1);
  const double mantissa = std::ldexp(double(bits & ((1 << f.mantissa_bits) - 1)), -f.mantissa_bits);
  double x;
  if (exponent == (1 << f.exponent_bits) - 1)
    x = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  else
    x = exponent == 0 ? std::ldexp(mantissa, 1 - bias) : std::ldexp(1 + mantissa, exponent - bias);
  return bits & 0x8000 ? -x : x;
}

template <class Storage>
uint16_t narrowed(float x) {
  Storage result;
  narrow(x, result);
  return result.bits;
}

template <class Storage>
class Number : public ::testing::Test {};
using Formats = ::testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(Number, Formats);

TYPED_TEST(Number, WidensEveryPattern) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const double expected = meaning<TypeParam>(uint16_t(bits)), x = widen(TypeParam{uint16_t(bits)});
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(x)) << bits;
    } else {
      ASSERT_EQ(x, expected) << bits;
      ASSERT_EQ(std::signbit(x), std::signbit(expected)) << bits;
    }
  }
}

TYPED_TEST(Number, NarrowingIsTheInverseOfWidening) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float x = widen(TypeParam{uint16_t(bits)});
    if (std::isnan(x))
      ASSERT_TRUE(std::isnan(widen(TypeParam{narrowed<TypeParam>(x)}))) << bits;
    else
      ASSERT_EQ(narrowed<TypeParam>(x), bits);
  }
}

// Between two neighbours: the midpoint rounds to the even one, everything else to the nearer.
TYPED_TEST(Number, RoundsToNearestEven) {
  constexpr Format f = kFormat<TypeParam>;
  const uint16_t infinity = uint16_t(((1 << f.exponent_bits) - 1) << f.mantissa_bits);
  for (int sign = 0; sign < 2; ++sign)
    for (uint16_t low = 0; low < infinity; ++low) {
      const uint16_t high = uint16_t(low + 1), flag = uint16_t(sign << 15);
      // Rounding treats infinity as the next number of an unbounded exponent.
      const double below = meaning<TypeParam>(low),
                   above = high == infinity ? std::ldexp(1.0, 1 << (f.exponent_bits - 1)) : meaning<TypeParam>(high);
      const float middle = float((below + above) / 2 * (sign ? -1 : 1));
      const uint16_t even = uint16_t((low % 2 == 0 ? low : high) | flag);
      ASSERT_EQ(double(std::abs(middle)), (below + above) / 2) << "the midpoint is a float";
      ASSERT_EQ(narrowed<TypeParam>(middle), even) << low;
      ASSERT_EQ(narrowed<TypeParam>(std::nextafter(middle, 0.0f)), low | flag) << low;
      ASSERT_EQ(narrowed<TypeParam>(std::nextafter(middle, sign ? -INFINITY : INFINITY)), high | flag) << low;
    }
}

TYPED_TEST(Number, InfinityNaNAndZero) {
  for (float x : {INFINITY, -INFINITY}) EXPECT_EQ(widen(TypeParam{narrowed<TypeParam>(x)}), x);
  for (uint32_t bits : {0x7fc00000u, 0x7f800001u, 0xffffffffu, 0x7fffffffu, 0x7f80ffffu, 0xff800001u})
    EXPECT_TRUE(std::isnan(widen(TypeParam{narrowed<TypeParam>(float_of_bits(bits))}))) << bits;
  EXPECT_EQ(narrowed<TypeParam>(0.0f), 0);
  EXPECT_EQ(narrowed<TypeParam>(-0.0f), 0x8000);
  EXPECT_EQ(narrowed<TypeParam>(std::numeric_limits<float>::denorm_min()), 0);
}

// The value of a float of 8 bits.
double meaning_of_byte(int bits, Format f) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1, exponent = bits >> f.mantissa_bits & ((1 << f.exponent_bits) - 1);
  const double mantissa = std::ldexp(double(bits & ((1 << f.mantissa_bits) - 1)), -f.mantissa_bits);
  const double x = exponent == 0 ? std::ldexp(mantissa, 1 - bias) : std::ldexp(1 + mantissa, exponent - bias);
  return bits & 0x80 ? -x : x;
}

void expect_widened(float found, double expected, int bits) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(found)) << bits;
  } else {
    EXPECT_EQ(double(found), expected) << bits;
    EXPECT_EQ(std::signbit(found), std::signbit(expected)) << bits;
  }
}

TEST(Byte, WidensEveryPattern) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  for (int bits = 0; bits < 256; ++bits) {
    const uint8_t byte = uint8_t(bits), magnitude = byte & 0x7f;
    double e4m3 = meaning_of_byte(bits, {4, 3}), e5m2 = meaning_of_byte(bits, {5, 2});
    if (magnitude == 0x7f) e4m3 = nan;
    if (magnitude >= 0x7c) e5m2 = magnitude > 0x7c ? nan : bits & 0x80 ? -infinity : infinity;
    expect_widened(widen(Float8E4M3{byte}), e4m3, bits);
    expect_widened(widen(Float8E5M2{byte}), e5m2, bits);
    expect_widened(widen(Int8{int8_t(byte)}), bits - (bits & 0x80 ? 256 : 0), bits);
    for (DType dtype : {DType::float8_e4m3fn, DType::float8_e5m2, DType::int8}) {
      const double expected = dtype == DType::int8 ? double(int8_t(byte)) : dtype == DType::float8_e5m2 ? e5m2 : e4m3;
      alignas(double) const uint8_t bytes[2 * sizeof(double)] = {0, byte};
      expect_widened(load_stored_element<float>(bytes, dtype, 1), expected, bits);
    }
  }
}

TEST(Element, LoadsAndStoresEveryDType) {
  for (DType dtype : {DType::float32, DType::float64, DType::bfloat16, DType::float16}) {
    double storage[4] = {};
    store_element(storage, dtype, 3, 1.5);
    EXPECT_EQ(load_element<float>(storage, dtype, 3), 1.5f);
    EXPECT_EQ(load_element<double>(storage, dtype, 3), 1.5);
    EXPECT_EQ(load_element<double>(storage, dtype, 2), 0.0);
  }
  const uint8_t flags[3] = {0, 1, 255};
  EXPECT_EQ(load_element<float>(flags, DType::boolean, 0), 0.0f);
  EXPECT_EQ(load_element<float>(flags, DType::boolean, 1), 1.0f);
  EXPECT_EQ(load_element<float>(flags, DType::boolean, 2), 1.0f);
}

}  // namespace
}  // namespace scaledot
