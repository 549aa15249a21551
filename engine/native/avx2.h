// Vectors in two halves, for CPUs that have AVX2 but not AVX-512: Vec and IntVec as simd.h
// describes them, and the intrinsics of AVX-512 that the kernels use, under the same names.
//
// They are structures, because GCC keeps its own vectors of 64 bytes in memory if the CPU has no
// registers of that size.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace baton {

struct IntVec;

// 16 floats.
struct __attribute__((may_alias)) Vec {
  __m256 low;
  __m256 high;

  inline explicit operator IntVec() const;
  float operator[](int i) const {
    float lanes[16];
    std::memcpy(lanes, this, sizeof lanes);
    return lanes[i];
  }
};

// 16 integers, or any 64 bytes.
struct __attribute__((may_alias)) IntVec {
  __m256i low;
  __m256i high;

  explicit operator Vec() const { return {_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)}; }
  int32_t operator[](int i) const {
    int32_t lanes[16];
    std::memcpy(lanes, this, sizeof lanes);
    return lanes[i];
  }
};

using Bits = IntVec;  // as the intrinsics take them
using Floats = Vec;

inline Vec::operator IntVec() const {
  return {_mm256_castps_si256(low), _mm256_castps_si256(high)};
}

inline Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline IntVec splat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }

// -- floats -------------------------------------------------------------------------------------

#define BATON_ARITHMETIC(op)                                                                       \
  BATON_INLINE inline Vec operator op(Vec a, Vec b) { return {a.low op b.low, a.high op b.high}; } \
  BATON_INLINE inline Vec operator op(Vec a, float b) { return a op splat(b); }                    \
  BATON_INLINE inline Vec operator op(float a, Vec b) { return splat(a) op b; }                    \
  BATON_INLINE inline Vec& operator op##=(Vec& a, Vec b) { return a = a op b; }                    \
  BATON_INLINE inline Vec& operator op##=(Vec& a, float b) { return a = a op splat(b); }
BATON_ARITHMETIC(+)
BATON_ARITHMETIC(-)
BATON_ARITHMETIC(*)
BATON_ARITHMETIC(/)
#undef BATON_ARITHMETIC

BATON_INLINE inline Vec operator-(Vec a) { return {-a.low, -a.high}; }

// All bits of a lane, or none.
#define BATON_COMPARISON(op, how)                                     \
  BATON_INLINE inline IntVec operator op(Vec a, Vec b) {              \
    return {_mm256_castps_si256(_mm256_cmp_ps(a.low, b.low, how)),    \
            _mm256_castps_si256(_mm256_cmp_ps(a.high, b.high, how))}; \
  }
BATON_COMPARISON(<, _CMP_LT_OQ)
BATON_COMPARISON(>, _CMP_GT_OQ)
BATON_COMPARISON(==, _CMP_EQ_OQ)
BATON_COMPARISON(!=, _CMP_NEQ_UQ)
#undef BATON_COMPARISON

BATON_INLINE inline Vec _mm512_fmadd_ps(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
BATON_INLINE inline Vec _mm512_max_ps(Vec a, Vec b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}

// -- bits ---------------------------------------------------------------------------------------

// `name` of two vectors by an intrinsic for each half.
#define BATON_OF_TWO(name, of_half)                          \
  BATON_INLINE inline IntVec name(IntVec a, IntVec b) {      \
    return {of_half(a.low, b.low), of_half(a.high, b.high)}; \
  }
BATON_OF_TWO(operator&, _mm256_and_si256)
BATON_OF_TWO(operator|, _mm256_or_si256)
BATON_OF_TWO(operator+, _mm256_add_epi32)
BATON_OF_TWO(operator-, _mm256_sub_epi32)
BATON_OF_TWO(operator>, _mm256_cmpgt_epi32)
BATON_OF_TWO(_mm512_and_si512, _mm256_and_si256)
BATON_OF_TWO(_mm512_or_si512, _mm256_or_si256)
BATON_OF_TWO(_mm512_xor_si512, _mm256_xor_si256)
BATON_OF_TWO(_mm512_add_epi16, _mm256_add_epi16)
BATON_OF_TWO(_mm512_add_epi32, _mm256_add_epi32)
BATON_OF_TWO(_mm512_sub_epi8, _mm256_sub_epi8)
BATON_OF_TWO(_mm512_max_epu8, _mm256_max_epu8)
BATON_OF_TWO(_mm512_min_epu8, _mm256_min_epu8)
BATON_OF_TWO(_mm512_packus_epi16, _mm256_packus_epi16)
BATON_OF_TWO(_mm512_shuffle_epi8, _mm256_shuffle_epi8)
BATON_OF_TWO(_mm512_unpacklo_epi8, _mm256_unpacklo_epi8)
BATON_OF_TWO(_mm512_unpackhi_epi8, _mm256_unpackhi_epi8)
BATON_OF_TWO(_mm512_unpacklo_epi32, _mm256_unpacklo_epi32)
BATON_OF_TWO(_mm512_unpackhi_epi32, _mm256_unpackhi_epi32)
BATON_OF_TWO(_mm512_unpacklo_epi64, _mm256_unpacklo_epi64)
BATON_OF_TWO(_mm512_unpackhi_epi64, _mm256_unpackhi_epi64)
// Unlike AVX-512's masks, these have a whole lane for each number: all bits or none.
BATON_OF_TWO(greater_16, _mm256_cmpgt_epi16)
BATON_OF_TWO(equal_16, _mm256_cmpeq_epi16)
#undef BATON_OF_TWO

// `name` of a vector and a count by an intrinsic for each half.
#define BATON_BY_COUNT(name, of_half)                        \
  BATON_INLINE inline IntVec name(IntVec a, int count) {     \
    return {of_half(a.low, count), of_half(a.high, count)};  \
  }
BATON_BY_COUNT(operator<<, _mm256_slli_epi32)
BATON_BY_COUNT(operator>>, _mm256_srai_epi32)
BATON_BY_COUNT(_mm512_slli_epi16, _mm256_slli_epi16)
BATON_BY_COUNT(_mm512_srli_epi16, _mm256_srli_epi16)
BATON_BY_COUNT(_mm512_slli_epi32, _mm256_slli_epi32)
BATON_BY_COUNT(_mm512_srli_epi32, _mm256_srli_epi32)
BATON_BY_COUNT(_mm512_srai_epi32, _mm256_srai_epi32)
#undef BATON_BY_COUNT

inline IntVec operator&(IntVec a, int32_t b) { return a & splat(b); }
inline IntVec operator+(IntVec a, int32_t b) { return a + splat(b); }
inline IntVec operator-(IntVec a, int32_t b) { return a - splat(b); }
inline IntVec operator>(IntVec a, int32_t b) { return a > splat(b); }
inline IntVec operator<(IntVec a, int32_t b) { return splat(b) > a; }
inline IntVec operator~(IntVec a) { return splat(-1) - a; }
inline IntVec operator>=(IntVec a, int32_t b) { return ~(a < b); }
inline IntVec& operator|=(IntVec& a, IntVec b) { return a = a | b; }

inline IntVec _mm512_set1_epi8(char x) { return {_mm256_set1_epi8(x), _mm256_set1_epi8(x)}; }
inline IntVec _mm512_set1_epi16(short x) { return {_mm256_set1_epi16(x), _mm256_set1_epi16(x)}; }
inline IntVec _mm512_set1_epi32(int x) { return splat(x); }
inline IntVec _mm512_broadcast_i32x4(__m128i x) {
  return {_mm256_broadcastsi128_si256(x), _mm256_broadcastsi128_si256(x)};
}

inline IntVec _mm512_loadu_si512(const void* at) {
  const __m256i* halves = (const __m256i*)at;
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline IntVec _mm512_load_si512(const void* at) { return _mm512_loadu_si512(at); }
inline void _mm512_storeu_si512(void* at, IntVec x) {
  _mm256_storeu_si256((__m256i*)at, x.low);
  _mm256_storeu_si256((__m256i*)at + 1, x.high);
}

// -- from one size of number to another ---------------------------------------------------------

#define BATON_WIDENED(name, of_half)                             \
  BATON_INLINE inline IntVec name(__m256i x) {                   \
    return {of_half(_mm256_castsi256_si128(x)),                  \
            of_half(_mm256_extracti128_si256(x, 1))};            \
  }
BATON_WIDENED(_mm512_cvtepu16_epi32, _mm256_cvtepu16_epi32)
BATON_WIDENED(_mm512_cvtepu8_epi16, _mm256_cvtepu8_epi16)
BATON_WIDENED(_mm512_cvtepi8_epi16, _mm256_cvtepi8_epi16)
#undef BATON_WIDENED

inline Vec _mm512_cvtepi32_ps(IntVec x) {
  return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)};
}
// Of words whose upper halves are zeros.
BATON_INLINE inline __m256i _mm512_cvtepi32_epi16(IntVec x) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(x.low, x.high), 0xd8);
}

// Sixteen numbers of 16 bits, by their bytes.
class NumberTable {
 public:
  constexpr NumberTable(std::initializer_list<uint16_t> numbers) {
    int i = 0;
    for (const uint16_t number : numbers) {
      lower_[i] = (uint8_t)number;
      upper_[i++] = (uint8_t)(number >> 8);
    }
  }

  // Looks up a number for each of 32 indices, which are in their lower four bits.
  BATON_INLINE IntVec look_up(IntVec x) const {
    const IntVec places = (x & _mm512_set1_epi16(15)) | _mm512_set1_epi16((short)0x8000);
    const auto bytes = [&](const uint8_t* table) BATON_INLINE {  // zeros for upper ones
      const __m128i all = _mm_load_si128((const __m128i*)table);
      return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), places);
    };
    return bytes(lower_) | _mm512_slli_epi16(bytes(upper_), 8);
  }

 private:
  alignas(16) uint8_t lower_[16] = {};
  alignas(16) uint8_t upper_[16] = {};
};

}  // namespace baton
