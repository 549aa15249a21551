// bf16 weights in 12 bits each, without loss: exponents of a layer's weights lie close together, so
// that four bits tell them apart, and the few weights that lie elsewhere are corrected afterwards.
//
// A word of a panel is 64 outputs by two inputs: 128 numbers, four vectors of 32. Three are stored,
// 16 bits a number: sign, four bits of the fourth vector's, four bits of exponent, seven of mantissa.

#pragma once

#include "simd.h"

#if defined(__AVX512BF16__)

namespace baton {

constexpr int kExponents = 16;  // that four bits tell apart

// What is missing from the product of one input with one output of a panel.
struct Correction {
  int32_t input;
  int32_t output;
  float amount;  // the weight less what stands for it
};

struct NarrowPanel {
  const char* at;
  __m512i lowest;  // exponent, where it stands in bf16
  static constexpr int kWordBytes = 192;

  BATON_INLINE void read(int w, Vec* to) const {
    const __m512i kept = _mm512_set1_epi16((short)0x87ff);
    __m512i x[3];
    for (int i = 0; i < 3; ++i) {
      x[i] = _mm512_load_si512(at + w * kWordBytes + 64 * i);
      to[i] = (Vec)_mm512_add_epi16(_mm512_and_si512(x[i], kept), lowest);
    }
    const __m512i high = _mm512_ternarylogic_epi32(  // bits from where the mask says, else
        _mm512_set1_epi16(0x00f0), _mm512_srli_epi16(x[1], 7), _mm512_srli_epi16(x[0], 3), 0xca);
    const __m512i fourth = _mm512_ternarylogic_epi32(
        _mm512_set1_epi16(0x000f), _mm512_srli_epi16(x[2], 11), high, 0xca);
    const __m512i magnitude =
        _mm512_add_epi16(_mm512_and_si512(fourth, _mm512_set1_epi16(0x07ff)), lowest);
    to[3] = (Vec)_mm512_ternarylogic_epi32(  // magnitude | (sign & its place)
        magnitude, _mm512_slli_epi16(fourth, 4), _mm512_set1_epi16((short)0x8000), 0xf8);
  }
};

inline int exponent_of(uint16_t bits) { return bits >> 7 & 0xff; }

// The first of the sixteen exponents that most of a panel's weights have, and how many have another.
// `weight` [outputs, inputs] are those of one panel.
inline int lowest_exponent(const Bf16* weight, int64_t count, int64_t* others) {
  int64_t times[256] = {};
  for (int64_t i = 0; i < count; ++i) ++times[exponent_of(weight[i].bits)];
  int64_t here = 0, most = -1;
  int best = 0;
  for (int end = 0; end < 255; ++end) {
    here += times[end];
    if (end >= kExponents) here -= times[end - kExponents];
    if (end >= kExponents - 1 && here >= most) {
      most = here;
      best = end - kExponents + 1;
    }
  }
  *others = count - most;
  return best;
}

// What stands for a number: itself, or the nearest in size that twelve bits can say.
inline uint16_t nearest_narrow(uint16_t bits, int lowest) {
  const int exponent = exponent_of(bits);
  if (exponent < lowest) return (uint16_t)((bits & 0x8000) | lowest << 7);
  if (exponent >= lowest + kExponents)
    return (uint16_t)((bits & 0x8000) | (lowest + kExponents - 1) << 7 | 0x7f);
  return bits;
}

// A word's 128 numbers in 192 bytes.
inline void narrow_word(const uint16_t* from, int lowest, uint16_t* to) {
  for (int i = 0; i < 32; ++i) {
    uint16_t narrow[4];
    for (int j = 0; j < 4; ++j) {
      const uint16_t bits = nearest_narrow(from[32 * j + i], lowest);
      narrow[j] = (uint16_t)((bits >> 4 & 0x800) | ((bits & 0x7fff) - (lowest << 7)));
    }
    for (int j = 0; j < 3; ++j)
      to[32 * j + i] = (uint16_t)((narrow[j] & 0x800) << 4 | (narrow[3] >> (8 - 4 * j) & 0xf) << 11 |
                                  (narrow[j] & 0x7ff));
  }
}

}  // namespace baton

#endif
