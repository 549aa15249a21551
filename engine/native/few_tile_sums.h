// The sums of few_sums.h as tiles have them, bit for bit, by vectors: beside a busy neighbour on the
// same core an instruction on tiles takes several times as long, one on vectors does not, and few rows
// leave most of a tile idle.
//
// A product of tiles sums the even and the odd numbers of up to 16 words apart, by fused multiply-adds
// in order, and adds the two to what was there; numbers too small to be normal count as zeros
// (Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS): so these sums are to be
// taken within the life of a NormalNumbers.

#pragma once

#include <type_traits>

#include "few_groups.h"

#if defined(__AMX_BF16__)

namespace baton {

// The even and the odd numbers of R rows of words.
template <int R, int kMost>
struct Halves {
  alignas(64) float even[R][kMost];
  alignas(64) float odd[R][kMost];

  // Splits rows of `count` words each (at most kMost), which are `stride` apart.
  Halves(const int32_t* words, int count, int stride) {
    for (int r = 0; r < R; ++r)
      for (int w = 0; w < count; w += kLanes) {
        const int left = count - w;
        const __mmask16 mask = left >= kLanes ? 0xffff : (__mmask16)((1u << left) - 1);
        const Vec x = (Vec)_mm512_maskz_loadu_epi32(mask, words + r * stride + w);
        store(even[r] + w, even_of(x));
        store(odd[r] + w, odd_of(x));
      }
  }
};

// A product's sums of R rows and C vectors of columns.
template <int R, int C>
struct Product {
  Vec even[R][C] = {};
  Vec odd[R][C] = {};

  // Adds the products of word w of the rows and right(c) of each vector of columns. All even
  // numbers come first, then all odd ones, because there are too few registers for both.
  template <int kMost, class Right>
  BATON_INLINE void add(const Halves<R, kMost>& left, int w, const Right& right) {
    add_half(even, left.even, w, [&](int c) BATON_INLINE { return even_of(right(c)); });
    add_half(odd, left.odd, w, [&](int c) BATON_INLINE { return odd_of(right(c)); });
  }

  // Adds to `sums`, whose rows are `stride` apart; the first product writes them.
  BATON_INLINE void store_on(float* sums, int stride, bool is_first) const {
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) {
        float* to = sums + r * stride + c * kLanes;
        store(to, (is_first ? Vec{} : load(to)) + (even[r][c] + odd[r][c]));
      }
  }

 private:
  template <int kMost, class Right>
  static BATON_INLINE void add_half(Vec (&sums)[R][C], const float (&left)[R][kMost], int w,
                                    const Right& right) {
    Vec rows[R];
    for (int r = 0; r < R; ++r) rows[r] = splat(left[r][w]);
    for (int c = 0; c < C; ++c) {
      const Vec column = right(c);
      for (int r = 0; r < R; ++r) sums[r][c] = fused(rows[r], column, sums[r][c]);
    }
  }
};

// The most vectors of columns for which the sums of R rows stay in registers.
template <int R>
constexpr int kColumnsAtOnce = R == 1 ? 8 : R <= 3 ? 4 : 2;

// The scores of R rows of q, `words` words each, with the keys of C groups: [R, 16 C], rows 64
// apart.
template <class P, int R, int C>
inline void score_groups(const int32_t* q, const void* const* keys, int words, float* scores,
                         Ahead ahead) {
  constexpr int kAtOnce = C < kColumnsAtOnce<R> ? C : kColumnsAtOnce<R>;
  const unsigned asked = ahead.in_steps(words * (C / kAtOnce));
  for (int c0 = 0; c0 < C; c0 += kAtOnce)
    for (int begin = 0; begin < words; begin += kTileWords) {
      const int count = words - begin < kTileWords ? words - begin : kTileWords;
      const Halves<R, kTileWords> left(q + begin, count, words);
      Product<R, kAtOnce> product;
      for (int w = 0; w < count; ++w) {
        ahead.ask(asked);
        product.add(left, w, [&](int c) BATON_INLINE {
          return read_words((const P*)keys[c0 + c] + (begin + w) * kGroupTokens * 2);
        });
      }
      product.store_on(scores + c0 * kLanes, kTileKeys, begin == 0);
    }
}

// The same with one group of keys in quads.
template <int R>
inline void score_quads(const int32_t* q, const Quads& keys, int words, float* scores, Ahead& ahead,
                        unsigned asked) {
  for (int begin = 0; begin < words; begin += kTileWords) {
    const Halves<R, kTileWords> left(q + begin, kTileWords, words);
    Product<R, 1> product;
    for (int w = 0; w < kTileWords; w += kQuadVectors) {
      ahead.ask(asked);
      const Quad quad = keys.read((begin + w) / kQuadVectors);
      for (int i = 0; i < kQuadVectors; ++i)
        product.add(left, w + i, [&](int) BATON_INLINE { return quad.vectors[i]; });
    }
    product.store_on(scores, kTileKeys, begin == 0);
  }
}

// Adds to columns [begin + 16 kFirst, begin + 16 (kFirst + C)) of `sums` [R, head_dim] the weights
// times the values of some groups, two groups in each product.
template <class P, int R, int C, int kFirst = 0>
inline void weigh_columns(const Halves<R, kTileKeys / 2>& weights, const SeenValues<P>* values,
                          int count, int head_dim, int begin, float* sums, Ahead& ahead,
                          unsigned asked) {
  for (int first = 0; first < count; first += 2) {
    Product<R, C> product;
    for (int group = first; group < count && group < first + 2; ++group) {
      const int pair0 = group * kGroupTokens / 2;
      for (int pair = 0; pair < kGroupTokens / 2; ++pair) {
        ahead.ask(asked);
        const auto right = values[group].template words<kFirst>(head_dim, pair, begin);
        product.add(weights, pair0 + pair, [&](int c) BATON_INLINE { return right(c); });
      }
    }
    product.store_on(sums + begin + kFirst * kLanes, head_dim, false);
  }
}

// Adds to `sums` [R, head_dim] R rows of a tile's weights times the values of some groups.
template <class P, int R>
inline void weigh_rows(const int32_t* weights, const SeenValues<P>* values, int count, int head_dim,
                       float* sums, Ahead ahead) {
  if constexpr (R > 4) {
    weigh_rows<P, 4>(weights, values, count, head_dim, sums, ahead);
    weigh_rows<P, R - 4>(weights + 4 * (kTileKeys / 2), values, count, head_dim,
                         sums + 4 * head_dim, Ahead());
  } else {
    constexpr bool kByQuads = std::is_same_v<P, Split>;
    constexpr int kColumns =
        kByQuads && kColumnsAtOnce<R> > kQuadVectors ? kQuadVectors : kColumnsAtOnce<R>;
    constexpr int kStep = (kByQuads ? kQuadVectors : kColumns) * kLanes;
    const Halves<R, kTileKeys / 2> left(weights, kTileKeys / 2, kTileKeys / 2);
    const int passes = head_dim / (kColumns * kLanes) + head_dim % kStep / kLanes;
    const unsigned asked = ahead.in_steps(passes * count * kGroupTokens / 2);
    int d = 0;
    for (; d + kStep <= head_dim; d += kStep) {
      weigh_columns<P, R, kColumns>(left, values, count, head_dim, d, sums, ahead, asked);
      if constexpr (kByQuads && kColumns < kQuadVectors)
        weigh_columns<P, R, kColumns, kColumns>(left, values, count, head_dim, d, sums, ahead, asked);
    }
    if constexpr (kByQuads) return;
    for (; d < head_dim; d += kLanes)
      weigh_columns<P, R, 1>(left, values, count, head_dim, d, sums, ahead, asked);
  }
}

}  // namespace baton

#endif
