// bf16 weights in 12 bits each, without loss: exponents of a layer's weights lie close together, so
// that four bits tell them apart. A word of a panel is 64 outputs by two inputs: 128 numbers, four
// vectors of 32. Three are stored, 16 bits a number: sign, four bits of the fourth vector's, four
// bits of exponent, seven of mantissa. The few words with a number that lies elsewhere stand among
// the others plain: as they are, in 16 bits a number.

#pragma once

#include <climits>

#include "simd.h"

#if defined(__AVX512BF16__)

namespace baton {

constexpr int kExponents = 16;     // that four bits tell apart
constexpr int kNarrowBytes = 192;  // of a word
constexpr int kPlainBytes = 256;

// A panel from one of its words on.
struct NarrowPanel {
  const char* at;
  __m512i lowest;        // exponent, where it stands in bf16
  const int32_t* plain;  // which words are, from here on, and a last one past all
  int first;             // word

  // Calls action(w, vectors) for as many words, in order.
  template <class Action>
  BATON_INLINE void for_words(int words, const Action& action) const {
    const char* from = at;
    const int32_t* next = plain;
    Vec vectors[4];
    for (int w = 0;; ++w, ++next, from += kPlainBytes) {
      for (const int stop = *next - first < words ? *next - first : words; w < stop; ++w) {
        widen(from, vectors);
        from += kNarrowBytes;
        action(w, vectors);
      }
      if (w == words) return;
      for (int i = 0; i < 4; ++i) vectors[i] = *(const Vec*)(from + 64 * i);
      action(w, vectors);
    }
  }

  // Word w, of which those before have been read so.
  BATON_INLINE void read_next(int w, Vec* to) {
    if (w < *plain - first) {
      widen(at, to);
      at += kNarrowBytes;
      return;
    }
    for (int i = 0; i < 4; ++i) to[i] = *(const Vec*)(at + 64 * i);
    at += kPlainBytes;
    ++plain;
  }

  BATON_INLINE void widen(const char* from, Vec* to) const {
    const __m512i kept = _mm512_set1_epi16((short)0x87ff);
    __m512i x[3];
    for (int i = 0; i < 3; ++i) {
      x[i] = _mm512_load_si512(from + 64 * i);
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

// The first of the sixteen exponents that most of `weight` [count] have.
inline int lowest_exponent(const Bf16* weight, int64_t count) {
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
  return best;
}

// Marks the words of one panel that stay plain: of each pair of inputs whether one of `outputs` rows
// of `weight` [outputs, inputs] has an exponent that is none of the sixteen. How many there are.
inline int mark_plain(const Bf16* weight, int inputs, int outputs, int lowest, char* is_plain) {
  std::memset(is_plain, 0, (size_t)inputs / 2);
  for (int i = 0; i < outputs; ++i, weight += inputs)
    for (int input = 0; input < inputs; ++input)
      is_plain[input / 2] |= (unsigned)(exponent_of(weight[input].bits) - lowest) >= kExponents;
  int count = 0;
  for (int w = 0; w < inputs / 2; ++w) count += is_plain[w];
  return count;
}

// A word's 128 numbers in 192 bytes.
inline void narrow_word(const uint16_t* from, int lowest, uint16_t* to) {
  for (int i = 0; i < 32; ++i) {
    uint16_t narrow[4];
    for (int j = 0; j < 4; ++j) {
      const uint16_t bits = from[32 * j + i];
      narrow[j] = (uint16_t)((bits >> 4 & 0x800) | (((bits & 0x7fff) - (lowest << 7)) & 0x7ff));
    }
    for (int j = 0; j < 3; ++j)
      to[32 * j + i] = (uint16_t)((narrow[j] & 0x800) << 4 | (narrow[3] >> (8 - 4 * j) & 0xf) << 11 |
                                  (narrow[j] & 0x7ff));
  }
}

}  // namespace baton

#endif
