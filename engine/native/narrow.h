// bf16 weights in 12 bits each, without loss: exponents of a layer's weights lie close together, so
// that four bits tell them apart. A word of a panel is 64 outputs by two inputs: a quad
// (upper_bytes.h), whose lower bytes and codes are stored. The few words with another exponent
// stand among the others plain, in 16 bits a number.

#pragma once

#include <climits>

#include "upper_bytes.h"

#if defined(BATON_PAIRS)

namespace baton {

constexpr int kExponents = 16;     // that four bits tell apart, from an even one on
constexpr int kNarrowBytes = 192;  // of a word
constexpr int kPlainBytes = 256;

// A panel from one of its words on.
struct NarrowPanel {
  const char* at;
  Bits upper;            // bytes of its exponents, by code
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

  // Word w. The words before it must have been read with this function, in order.
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
    const Quad quad = with_lower(from, upper_bytes(_mm512_loadu_si512(from + 128), upper));
    for (int i = 0; i < kQuadVectors; ++i) to[i] = quad.vectors[i];
  }
};

inline int exponent_of(uint16_t bits) { return bits >> 7 & 0xff; }

// The first of the sixteen neighbouring exponents that most of `weight` [count] have; it is even.
inline int lowest_exponent(const Bf16* weight, int64_t count) {
  int64_t times[256] = {};
  for (int64_t i = 0; i < count; ++i) ++times[exponent_of(weight[i].bits)];
  int64_t here = 0, most = -1;
  int best = 0;
  for (int end = 0; end < 255; ++end) {
    here += times[end];
    if (end >= kExponents) here -= times[end - kExponents];
    if (end >= kExponents - 1 && end % 2 != 0 && here >= most) {
      most = here;
      best = end - kExponents + 1;
    }
  }
  return best;
}

// Marks the words of one panel that stay plain: the pairs of inputs for which one of the `outputs`
// rows of `weight` [outputs, inputs] has an exponent other than the sixteen. Returns their number.
inline int mark_plain(const Bf16* weight, int inputs, int outputs, int lowest, char* is_plain) {
  std::memset(is_plain, 0, (size_t)inputs / 2);
  for (int i = 0; i < outputs; ++i, weight += inputs)
    for (int input = 0; input < inputs; ++input)
      is_plain[input / 2] |= (unsigned)(exponent_of(weight[input].bits) - lowest) >= kExponents;
  int count = 0;
  for (int w = 0; w < inputs / 2; ++w) count += is_plain[w];
  return count;
}

// Packs a word's 128 numbers into 192 bytes.
inline void narrow_word(const char* from, char* to) {
  Quad quad;
  std::memcpy(quad.vectors, from, sizeof(quad.vectors));
  const QuadBytes parts = bytes_of(quad);
  for (int i = 0; i < 2; ++i) _mm512_storeu_si512(to + 64 * i, parts.lower[i]);
  _mm512_storeu_si512(to + 128, parts.codes);
}

}  // namespace baton

#endif
