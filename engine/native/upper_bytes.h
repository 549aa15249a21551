// bf16 numbers split into bytes, 128 at a time, so that weights (narrow.h) and keys and values
// (split.h) take 12 bits a number.
//
// A quad is four vectors. Of a number's upper byte, a sign and seven bits of exponent, the sign and
// the three lower bits are its code, the four upper ones its rest. If all upper bytes, apart from
// the sign, are among eight neighbours (sixteen exponents), the first of the eight determines all
// rests.

#pragma once

#include "simd.h"

#if defined(BATON_PAIRS)

namespace baton {

constexpr int kQuadVectors = 4;
constexpr int kLastUpper = 120;  // the last byte that is the first of eight

// The upper bytes of all codes, for each first of eight.
struct UpperBytes {
  alignas(64) uint8_t of[kLastUpper + 1][16] = {};

  constexpr UpperBytes() {
    for (int first = 0; first <= kLastUpper; ++first)
      for (int code = 0; code < 16; ++code)
        of[first][code] = (uint8_t)((code & 8) << 4 | (first + ((code - first) & 7)));
  }
};
inline constexpr UpperBytes kUpperBytes;

BATON_INLINE inline Bits upper_table(int first) {
  return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)kUpperBytes.of[first]));
}

struct Quad {
  Vec vectors[kQuadVectors];
};

// The upper bytes of a quad's first two vectors, and of its other two, in the order of the lower
// bytes.
struct Uppers {
  Bits first;
  Bits second;
};

BATON_INLINE inline Uppers upper_bytes(Bits codes, Bits table) {
  const Bits low = _mm512_set1_epi8(15);
  return {_mm512_shuffle_epi8(table, _mm512_and_si512(codes, low)),
          _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low))};
}

// `low` has the lower bytes.
BATON_INLINE inline Quad with_lower(const char* low, const Uppers& upper) {
  const Bits first = _mm512_loadu_si512(low), second = _mm512_loadu_si512(low + 64);
  return {{(Vec)_mm512_unpacklo_epi8(first, upper.first),
           (Vec)_mm512_unpackhi_epi8(first, upper.first),
           (Vec)_mm512_unpacklo_epi8(second, upper.second),
           (Vec)_mm512_unpackhi_epi8(second, upper.second)}};
}

// A quad split into its parts. A vector of bytes has 16 bytes of one vector, then 16 of another,
// and so on; codes and rests of the first two vectors are the lower halves of bytes.
struct QuadBytes {
  Bits lower[2];
  Bits codes;
  Bits rests;
};

inline QuadBytes bytes_of(const Quad& quad) {
  const Bits lower = _mm512_set1_epi16(0xff);
  const auto lows = [&](int i) {
    return _mm512_packus_epi16(_mm512_and_si512((Bits)quad.vectors[i], lower),
                               _mm512_and_si512((Bits)quad.vectors[i + 1], lower));
  };
  const auto uppers = [&](int i) {
    return _mm512_packus_epi16(_mm512_srli_epi16((Bits)quad.vectors[i], 8),
                               _mm512_srli_epi16((Bits)quad.vectors[i + 1], 8));
  };
  const Bits first = uppers(0), second = uppers(2);
  const auto code = [](Bits upper) {
    const Bits sign = _mm512_and_si512(_mm512_srli_epi16(upper, 4), _mm512_set1_epi8(8));
    return _mm512_or_si512(sign, _mm512_and_si512(upper, _mm512_set1_epi8(7)));
  };
  const auto rest = [](Bits upper) {
    return _mm512_and_si512(_mm512_srli_epi16(upper, 3), _mm512_set1_epi8(15));
  };
  const auto both = [](Bits a, Bits b) {
    return _mm512_or_si512(a, _mm512_slli_epi16(b, 4));
  };
  return {{lows(0), lows(2)}, both(code(first), code(second)), both(rest(first), rest(second))};
}

}  // namespace baton

#endif
