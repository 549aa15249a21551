// Sums of a few rows of queries or weights over keys or values, which are read where they lie, by
// products of bf16 pairs.

#pragma once

#include <type_traits>

#include "few_groups.h"

#if defined(BATON_PAIRS) && !defined(__AMX_BF16__)

namespace baton {

// The sums of R rows and C vectors of columns.
template <int R, int C>
struct FewSums {
  Vec of[R][C];

  void load_from(const float* at, int stride) {
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) of[r][c] = load(at + r * stride + c * kLanes);
  }
  void store_to(float* at, int stride) const {
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) store(at + r * stride + c * kLanes, of[r][c]);
  }

  // Adds pair `w` of each row (rows are `stride` pairs apart) times right(c) of each vector of
  // columns.
  template <class Right>
  BATON_INLINE void add(const PairType* left, int w, int stride, const Right& right) {
    for_passes([&](auto pass) BATON_INLINE {
      Vec part[C];
      for (int c = 0; c < C; ++c) part[c] = PairWord::part<pass>(right(c));
      for (int r = 0; r < R; ++r) {
        const Vec x = PairWord::broadcast(left[(r * stride + w) * PairWord::kPasses + pass]);
        for (int c = 0; c < C; ++c) of[r][c] = PairWord::multiply_add(of[r][c], x, part[c]);
      }
    });
  }
};

// The scores of R rows of q, `words` pairs each, with the keys of C groups: [R, 16 C], rows 64
// apart.
template <class P, int R, int C>
inline void score_groups(const PairType* q, const void* const* keys, int words, float* scores,
                         Ahead ahead) {
  const unsigned asked = ahead.in_steps(words);
  const P* at[C];
  for (int c = 0; c < C; ++c) at[c] = (const P*)keys[c];
  FewSums<R, C> sums = {};
  for (int w = 0; w < words; ++w) {
    ahead.ask(asked);
    Vec right[C];
    for (int c = 0; c < C; ++c) right[c] = read_words(at[c] + w * kGroupTokens * 2);
    sums.add(q, w, words, [&](int c) BATON_INLINE { return right[c]; });
  }
  sums.store_to(scores, kTileKeys);
}

// The same with one group of keys in quads.
template <int R>
inline void score_quads(const PairType* q, const Quads& keys, int words, float* scores, Ahead& ahead,
                        unsigned asked) {
  FewSums<R, 1> sums = {};
  for (int w = 0; w < words; w += kQuadVectors) {
    ahead.ask(asked);
    const Quad quad = keys.read(w / kQuadVectors);
    for (int i = 0; i < kQuadVectors; ++i)
      sums.add(q, w + i, words, [&](int) BATON_INLINE { return quad.vectors[i]; });
  }
  sums.store_to(scores, kTileKeys);
}

// Adds to columns [begin, begin + 16 C) of `sums` [R, head_dim] the weights, rows of a tile's,
// times the values of some groups.
template <class P, int R, int C>
inline void weigh_columns(const PairType* weights, const SeenValues<P>* values, int count,
                          int head_dim, int begin, float* sums, Ahead& ahead, unsigned asked) {
  FewSums<R, C> here;
  here.load_from(sums + begin, head_dim);
  for (int group = 0; group < count; ++group)
    for (int pair = 0; pair < kGroupTokens / 2; ++pair) {
      ahead.ask(asked);
      const auto right = values[group].template words<0>(head_dim, pair, begin);
      here.add(weights, group * (kGroupTokens / 2) + pair, kTileKeys / 2, right);
    }
  here.store_to(sums + begin, head_dim);
}

template <class P, int R>
inline void weigh_rows(const PairType* weights, const SeenValues<P>* values, int count, int head_dim,
                       float* sums, Ahead ahead) {
  if constexpr (R > 4) {
    weigh_rows<P, 4>(weights, values, count, head_dim, sums, ahead);
    weigh_rows<P, R - 4>(weights + 4 * (kTileKeys / PairWord::kPerWord), values, count, head_dim,
                         sums + 4 * head_dim, Ahead());
  } else {
    constexpr bool kByQuads = std::is_same_v<P, Split>;
    constexpr int kColumns = kByQuads ? kQuadVectors : R <= 2 ? 8 : 4;
    const int vectors = head_dim / kLanes;
    const int passes = vectors / kColumns + vectors % kColumns / 4 + vectors % 4;
    const unsigned asked = ahead.in_steps(passes * count * kGroupTokens / 2);
    int d = 0;
    for (; d + kColumns * kLanes <= head_dim; d += kColumns * kLanes)
      weigh_columns<P, R, kColumns>(weights, values, count, head_dim, d, sums, ahead, asked);
    if constexpr (kByQuads) return;
    for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes)
      weigh_columns<P, R, 4>(weights, values, count, head_dim, d, sums, ahead, asked);
    for (; d < head_dim; d += kLanes)
      weigh_columns<P, R, 1>(weights, values, count, head_dim, d, sums, ahead, asked);
  }
}

}  // namespace baton

#endif
