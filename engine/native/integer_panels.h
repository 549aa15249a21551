// Panels of integers of 8 bits, and of floats of 8 or 4.

#pragma once

#include "masked.h"
#include "panels.h"

#if defined(BATON_PAIRS)

namespace baton {

// Word w of a panel's integers as bf16 pairs, 16 outputs to a vector: exact.
struct Int8Panel {
  const char* at;
  static constexpr int kWordBytes = 128;
#if defined(__AVX512BF16__)
  BATON_INLINE void read(int w, Vec* to) const {
    for (int j = 0; j < kPanelColumns; ++j) {
      const __m128i* half = (const __m128i*)(at + w * kWordBytes + 32 * j);
      const Vec low = (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(half)));
      const Vec high = (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(half + 1)));
      to[j] = (Vec)to_bf16(low, high);
    }
  }
#else
  // The parts of its pairs: all odd numbers, then all even ones.
  BATON_INLINE void read_parts(int w, Vec* to) const {
    for (int j = 0; j < kPanelColumns; ++j) {
      const Bits pairs =
          _mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i*)(at + w * kWordBytes + 32 * j)));
      const Bits even = _mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 16);
      to[j] = (Vec)_mm512_cvtepi32_ps(_mm512_srai_epi32(pairs, 16));
      to[kPanelColumns + j] = (Vec)_mm512_cvtepi32_ps(even);
    }
  }
#endif
};

// e2m1 in bf16.
#define BATON_FLOATS                                                                               \
  0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, \
      0xc000, 0xc040, 0xc080, 0xc0c0

// Looks up one of sixteen floats for each 16 bits, by their lower four bits.
BATON_INLINE inline Vec float4_numbers(Bits codes) {
#if defined(BATON_HALVES)
  static constexpr NumberTable kFloats({BATON_FLOATS});
  return (Vec)kFloats.look_up(codes);
#else
  alignas(64) static constexpr uint16_t kFloats[32] = {BATON_FLOATS, BATON_FLOATS};
  const Bits floats = _mm512_load_si512(kFloats);
  return (Vec)_mm512_permutexvar_epi16(codes, floats);  // the index is five bits, one of them idle
#endif
}
#undef BATON_FLOATS

// Nibble j of the 16-bit lane l of a word is half l % 2 of output 16 j + l / 2.
struct Float4Panel {
  const char* at;
  static constexpr int kWordBytes = 64;
  BATON_INLINE void read(int w, Vec* to) const {
    const Bits packed = _mm512_load_si512(at + w * kWordBytes);
    to[0] = float4_numbers(packed);
    to[1] = float4_numbers(_mm512_srli_epi16(packed, 4));
    to[2] = float4_numbers(_mm512_srli_epi16(packed, 8));
    to[3] = float4_numbers(_mm512_srli_epi16(packed, 12));
  }
};

// e4m3, in the order of Int8Panel.
struct Float8Panel {
  const char* at;
  static constexpr int kWordBytes = 128;
  BATON_INLINE void read(int w, Vec* to) const {
    for (int j = 0; j < kPanelColumns; ++j)
      to[j] = (Vec)load_pairs(0xffffffffu, (const Fp8*)(at + w * kWordBytes + 32 * j));
  }
};

}  // namespace baton

#endif
