// Vectors of 16 floats on whatever the compiler was told to use (AVX-512, AVX2, or neither).
//
// Most is written with the vector extensions of GCC and Clang, which lower a 64-byte vector to what
// the target has. Intrinsics are used only where the extensions express something badly. With AVX2,
// avx2.h stands in for both.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define BATON_INLINE __attribute__((always_inline))

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__FMA__)
#include <immintrin.h>
#define BATON_PAIRS  // there are PairWords (words.h), and what stands on them
#if !defined(__AMX_BF16__)
#define BATON_INT8  // there are products of integers, for CPUs with VNNI
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "avx2.h"
#define BATON_HALVES  // of vectors
#define BATON_PAIRS
#endif

namespace baton {

constexpr int kLanes = 16;

#if defined(BATON_HALVES)
constexpr bool kHalves = true;
#else
constexpr bool kHalves = false;

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
#if defined(BATON_PAIRS)
using Bits = __m512i;  // as intrinsics take them
using Floats = __m512;
#endif

inline Vec splat(float x) { return Vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
#endif

#if defined(__AVX512F__)
constexpr int kMaxRows = 6;  // 6 x 4 accumulators, 4 operands and a broadcast fill 32 registers
constexpr int kMaxColumns = 4;
#elif defined(BATON_HALVES)
constexpr int kMaxRows = 6;  // 6 x 2 accumulators, 2 operands and a broadcast: of 16 registers
constexpr int kMaxColumns = 1;
#else
constexpr int kMaxRows = 2;
constexpr int kMaxColumns = 2;
#endif

template <class T>
inline T load_as(const void* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <class T>
inline void store_as(void* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

#if defined(BATON_HALVES)
// By intrinsics, because the compiler copies 64 bytes through memory.
template <>
inline Vec load_as<Vec>(const void* at) {
  return (Vec)_mm512_loadu_si512(at);
}
template <>
inline IntVec load_as<IntVec>(const void* at) {
  return _mm512_loadu_si512(at);
}
template <>
inline void store_as<Vec>(void* at, Vec value) {
  _mm512_storeu_si512(at, (IntVec)value);
}
template <>
inline void store_as<IntVec>(void* at, IntVec value) {
  _mm512_storeu_si512(at, value);
}
#endif

inline Vec select(IntVec mask, Vec yes, Vec no) {
  return (Vec)((mask & (IntVec)yes) | (~mask & (IntVec)no));
}

inline IntVec lane_numbers() {
  alignas(64) static constexpr int32_t kNumbers[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                           8, 9, 10, 11, 12, 13, 14, 15};
  return load_as<IntVec>(kNumbers);
}

// The larger of each pair; b where one is NaN.
inline Vec larger(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((Floats)a, (Floats)b);
#elif defined(BATON_HALVES)
  return _mm512_max_ps(a, b);
#else
  return select((IntVec)(a > b), a, b);
#endif
}

inline float sum(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((Floats)x);
#elif defined(BATON_HALVES)
  const __m256 halves = x.low + x.high;
  const __m128 quarters = _mm256_castps256_ps128(halves) + _mm256_extractf128_ps(halves, 1);
  const __m128 pairs = quarters + _mm_movehl_ps(quarters, quarters);
  return pairs[0] + pairs[1];
#else
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
#endif
}

inline float largest(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((Floats)x);
#else
  float best = x[0];
  for (int i = 1; i < kLanes; ++i) best = x[i] > best ? x[i] : best;
  return best;
#endif
}

// One bit for each lane, whose bits are all set or all clear; the first lane's is the lowest.
inline unsigned lanes_of(IntVec x) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((Bits)x, (Bits)x);
#elif defined(BATON_HALVES)
  return (unsigned)_mm256_movemask_ps((__m256)x.low) |
         (unsigned)_mm256_movemask_ps((__m256)x.high) << 8;
#else
  unsigned lanes = 0;
  for (int i = 0; i < kLanes; ++i) lanes |= (unsigned)(x[i] & 1) << i;
  return lanes;
#endif
}

inline bool any(IntVec x) { return lanes_of(x) != 0; }

#if defined(__AVX512F__)
// Combines four vectors into one: number i of each 128-bit lane combines the four numbers of that
// lane of a[i].
template <class Combine>
BATON_INLINE inline Floats combine_within(const Floats (&a)[4], const Combine& combine) {
  __m512d pairs[2];
  for (int i = 0; i < 2; ++i)
    pairs[i] = _mm512_castps_pd(combine(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                                        _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1])));
  return combine(_mm512_castpd_ps(_mm512_unpacklo_pd(pairs[0], pairs[1])),
                 _mm512_castpd_ps(_mm512_unpackhi_pd(pairs[0], pairs[1])));
}

// Combines four such vectors: lane 4i + j of the result combines number j of all four 128-bit lanes
// of a[i].
template <class Combine>
BATON_INLINE inline Floats combine_across(const Floats (&a)[4], const Combine& combine) {
  Floats halves[2];
  for (int i = 0; i < 2; ++i)
    halves[i] = combine(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88),
                        _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
  return combine(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                 _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
}
#endif

// The largest lane of each of the first `count` vectors; the others, up to 16, are -inf.
inline Vec largest_of_each(const Vec (&rows)[kLanes], int count) {
#if defined(__AVX512F__)
  const auto largest_of = [](Floats a, Floats b) { return _mm512_max_ps(a, b); };
  Floats fours[4];
  for (Floats& four : fours) four = _mm512_set1_ps(-INFINITY);
  for (int i = 0; 4 * i < count; ++i) {
    const Floats of[4] = {(Floats)rows[4 * i], (Floats)rows[4 * i + 1], (Floats)rows[4 * i + 2],
                          (Floats)rows[4 * i + 3]};
    fours[i] = combine_within(of, largest_of);
  }
  return (Vec)combine_across(fours, largest_of);
#else
  float each[kLanes];
  for (int i = 0; i < kLanes; ++i) each[i] = i < count ? largest(rows[i]) : -INFINITY;
  return load_as<Vec>(each);
#endif
}

// 2^x for x <= 64, relative error below 2^-22 (2^-18 if kRough, enough for what becomes bf16); at
// most 2^-125 below -126; NaN stays. Polynomials fitted for the least largest error.
template <bool kRough>
inline Vec exp2_bounded(Vec x) {
  const Vec lowest = splat(-126.0f);
#if defined(__AVX512F__)
  x = larger(lowest, x);
  const Vec n = (Vec)_mm512_roundscale_ps((Floats)x, 0);
#else
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  x = larger(lowest, x);
  const Vec shifted = x + magic;
  const Vec n = shifted - magic;
#endif
  const Vec r = x - n;  // |r| <= 1/2
  Vec p;
  if (kRough) {
    p = r * 9.5701003e-3f + 5.5917859e-2f;
    p = p * r + 2.4024744e-1f;
    p = p * r + 6.9312179e-1f;
    p = p * r + 9.9999928e-1f;
  } else {
    p = r * 1.3276470e-3f + 9.6755410e-3f;
    p = p * r + 5.5507131e-2f;
    p = p * r + 2.4022120e-1f;
    p = p * r + 6.9314694e-1f;
    p = p * r + 1.0000001f;
  }
#if defined(__AVX512F__)
  return (Vec)_mm512_scalef_ps((Floats)p, (Floats)n);
#else
  return (Vec)((IntVec)p + (((IntVec)shifted - (IntVec)magic) << 23));
#endif
}

struct Bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(Bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  return load_as<float>(&bits);
}

inline Bf16 to_bf16(float x) {  // to nearest, ties to even; NaN stays NaN
  const uint32_t bits = load_as<uint32_t>(&x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return Bf16{(uint16_t)((bits >> 16) | 0x40u)};
  return Bf16{(uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// From e4m3: a sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, 0x7f is NaN.
struct Fp8 {
  uint8_t bits;
};

inline float to_float(Fp8 x) {
  const uint32_t magnitude = x.bits & 0x7fu, sign = (uint32_t)(x.bits & 0x80u) << 24;
  const float small = (float)magnitude * 0x1p-9f;  // below 2^-6: multiples of 2^-9
  const uint32_t bits = magnitude == 0x7fu ? 0x7fc00000u
                        : magnitude < 8u   ? load_as<uint32_t>(&small)
                                           : (magnitude << 20) + (120u << 23);
  const uint32_t with_sign = bits | sign;
  return load_as<float>(&with_sign);
}

// To e4m3, one number in each lane: to nearest, ties to even; numbers beyond 448 become 448, the
// largest; NaN stays NaN.
inline IntVec to_fp8(Vec x) {
  const IntVec bits = (IntVec)x, absolute = bits & 0x7fffffff;
  const Vec size = select((Vec)absolute < splat(448.0f), (Vec)absolute, splat(448.0f));
  const IntVec at = (IntVec)size;
  const IntVec rounded = (at + 0x7ffff + ((at >> 20) & 1)) >> 20;
  const IntVec normal = rounded - (120 << 3);
  const Vec magic = splat(0x1p14f);  // whose neighbours are 2^-9 apart
  const IntVec small = (IntVec)(size + magic) - (IntVec)magic;
  const IntVec is_small = size < splat(0x1p-6f), is_nan = absolute > 0x7f800000;
  const IntVec magnitude = (is_small & small) | (~is_small & normal);
  return (is_nan & 0x7f) | (~is_nan & magnitude) | ((bits >> 24) & 0x80);
}

inline void from_float(float x, float* to) { *to = x; }
inline void from_float(float x, Fp8* to) { to->bits = (uint8_t)to_fp8(splat(x))[0]; }
inline void from_float(float x, Bf16* to) { *to = to_bf16(x); }

inline Vec load(const float* at) { return load_as<Vec>(at); }

inline Vec load(const Bf16* at) {
#if defined(__AVX512F__)
  const __m256i half = _mm256_loadu_si256((const __m256i*)at);
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#elif defined(BATON_HALVES)
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16);
#else
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = to_float(at[i]);
  return load_as<Vec>(wide);
#endif
}

inline Vec load(const Fp8* at) {
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = to_float(at[i]);
  return load_as<Vec>(wide);
}

inline void store(float* at, Vec x) { store_as(at, x); }

inline void store(Fp8* at, Vec x) {
  const IntVec narrow = to_fp8(x);
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)at, _mm512_cvtepi32_epi8((Bits)narrow));
#else
  for (int i = 0; i < kLanes; ++i) at[i].bits = (uint8_t)narrow[i];
#endif
}

#if defined(BATON_PAIRS)
// Rounds to bf16, in the upper halves of words, as AVX-512 BF16 does: to nearest, ties to even; NaN
// stays NaN, and numbers that are not normal become zero.
BATON_INLINE inline Bits round_to_bf16(Vec x) {
  const Bits bits = (Bits)x;
  const Bits even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const Bits rounded =
      _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
  const Bits quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const Bits sign = _mm512_and_si512(bits, _mm512_set1_epi32((int)0x80000000));
#if defined(BATON_HALVES)
  const IntVec is_small = (bits & 0x7f800000) < 1;
  const Bits upper =
      (Bits)select(is_small, (Vec)sign, select(x != x, (Vec)quiet, (Vec)rounded));
#else
  const __mmask16 is_nan = _mm512_cmp_ps_mask((Floats)x, (Floats)x, _CMP_UNORD_Q);
  const __mmask16 is_small = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
  const Bits upper = _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet),
                                           is_small, sign);
#endif
  return _mm512_and_si512(upper, _mm512_set1_epi32((int)0xffff0000));
}

// 32 numbers, `low` first.
BATON_INLINE inline Bits to_bf16(Vec low, Vec high) {
#if defined(__AVX512BF16__)
  return (Bits)_mm512_cvtne2ps_pbh((Floats)high, (Floats)low);
#elif defined(BATON_HALVES)
  return {_mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bf16(low), 16)),
          _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bf16(high), 16))};
#else
  const __m256i first = _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bf16(low), 16));
  const __m256i second = _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bf16(high), 16));
  return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
#endif
}
#endif

inline void store(Bf16* at, Vec x) {
#if defined(__AVX512BF16__)
  store_as(at, _mm512_cvtneps_pbh((Floats)x));
#elif defined(BATON_PAIRS)
  store_as(at, _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bf16(x), 16)));
#else
  for (int i = 0; i < kLanes; ++i) at[i] = to_bf16(x[i]);
#endif
}

// `count` < 16 values; the other lanes are 0.
template <class T>
inline Vec load_some(const T* at, int count) {
  float x[kLanes] = {};
  for (int i = 0; i < count; ++i) x[i] = to_float(at[i]);
  return load_as<Vec>(x);
}

template <class T>
inline void store_some(T* at, Vec x, int count) {
  for (int i = 0; i < count; ++i) from_float(x[i], at + i);
}

// Lines of memory that will be needed soon, prefetched one by one in the course of other work,
// because a core with a few dozen outstanding lines waits. The order is row by row: rows often lie
// side by side, and memory gives lines in order faster than lines of different rows.
class Ahead {
 public:
  Ahead() = default;
  // Lines `begin` to `end` of all rows, each of which has `per_row` lines.
  Ahead(const void* const* rows, unsigned begin, unsigned end, unsigned per_row)
      : left_(end - begin), row_bytes_(per_row * 64) {
    if (left_ == 0) return;
    row_ = rows + begin / per_row;
    row_end_ = (const char*)*row_ + row_bytes_;
    at_ = row_end_ - (per_row - begin % per_row) * 64;
  }

  // The number of lines to prefetch in each of `steps` steps.
  unsigned in_steps(unsigned steps) const { return (left_ + steps - 1) / steps; }

  BATON_INLINE void ask(unsigned count) {
    if (count > left_) count = left_;
    left_ -= count;
    for (; count > 0; --count) {
      if (at_ == row_end_) {
        at_ = (const char*)*++row_;
        row_end_ = at_ + row_bytes_;
      }
      __builtin_prefetch(at_);
      at_ += 64;
    }
  }

 private:
  unsigned left_ = 0;
  unsigned row_bytes_ = 0;
  const void* const* row_ = nullptr;
  const char* at_ = nullptr;
  const char* row_end_ = nullptr;
};

}  // namespace baton
