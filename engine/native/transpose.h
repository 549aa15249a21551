// Words of 32 bits, transposed.

#pragma once

#include "simd.h"

#if defined(BATON_PAIRS)

namespace baton {

// Takes two of each vector's four quarters: every other one, beginning with kFirst, 0 or 1.
template <int kFirst>
BATON_INLINE inline Bits quarters_of(Bits a, Bits b) {
#if defined(BATON_HALVES)
  constexpr int kWhich = kFirst == 0 ? 0x20 : 0x31;
  return {_mm256_permute2x128_si256(a.low, a.high, kWhich),
          _mm256_permute2x128_si256(b.low, b.high, kWhich)};
#else
  return _mm512_shuffle_i32x4(a, b, kFirst == 0 ? 0x88 : 0xdd);
#endif
}

// 16 vectors of 16 words of 32 bits, transposed: word w of all becomes vector w of `out`.
inline void transpose(Bits (&a)[16], int words, Vec* out, int out_stride) {
  Bits b[16];
  for (int i = 0; i < 8; ++i) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
    a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
  }
  // Now a[4g + w] holds, in its 128-bit lane l, word 4l + w of rows 4g to 4g + 3.
  for (int w = 0; w < 4; ++w) {
    const Bits even01 = quarters_of<0>(a[w], a[4 + w]), odd01 = quarters_of<1>(a[w], a[4 + w]);
    const Bits even23 = quarters_of<0>(a[8 + w], a[12 + w]);
    const Bits odd23 = quarters_of<1>(a[8 + w], a[12 + w]);
    const Bits words_of[4] = {quarters_of<0>(even01, even23), quarters_of<0>(odd01, odd23),
                              quarters_of<1>(even01, even23), quarters_of<1>(odd01, odd23)};
    for (int l = 0; l < 4; ++l)
      if (4 * l + w < words) out[(size_t)(4 * l + w) * out_stride] = (Vec)words_of[l];
  }
}

// The same for 16 rows of up to 16 words in memory.
inline void transpose_words(const void* const* rows, size_t byte_offset, int words, Vec* out,
                            int out_stride) {
  Bits a[16];
#if defined(BATON_HALVES)
  for (int i = 0; i < 16; ++i) {
    const char* from = (const char*)rows[i] + byte_offset;
    int32_t some[16] = {};
    if (words < 16) std::memcpy(some, from, (size_t)words * 4);
    a[i] = _mm512_loadu_si512(words < 16 ? (const char*)some : from);
  }
#else
  const __mmask16 mask = words >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << words) - 1);
  for (int i = 0; i < 16; ++i)
    a[i] = _mm512_maskz_loadu_epi32(mask, (const char*)rows[i] + byte_offset);
#endif
  transpose(a, words, out, out_stride);
}

}  // namespace baton

#endif
