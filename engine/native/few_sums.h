// What a few rows of queries or weights sum over keys or values where they lie, by dot products of
// bf16 pairs.

#pragma once

#include <type_traits>

#include "few_groups.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace baton {

// What R rows of q, [R, words] each, score with the keys of C groups: [R, 16 C], rows 64 apart.
template <class P, int R, int C>
inline void score_groups(const int32_t* q, const void* const* keys, int words, float* scores,
                         Ahead ahead) {
  const unsigned asked = ahead.in_steps(words);
  const P* at[C];
  Vec acc[R][C];
  for (int c = 0; c < C; ++c) at[c] = (const P*)keys[c];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = Vec{};
  for (int w = 0; w < words; ++w) {
    ahead.ask(asked);
    Vec right[C];
    for (int c = 0; c < C; ++c) right[c] = read_words(at[c] + w * kGroupTokens * 2);
    for (int r = 0; r < R; ++r) {
      const Vec left = PairWord::broadcast(q[r * words + w]);
      for (int c = 0; c < C; ++c) acc[r][c] = PairWord::multiply_add(acc[r][c], left, right[c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(scores + r * kTileKeys + c * kLanes, acc[r][c]);
}

// The same with one group of keys in quads.
template <int R>
inline void score_quads(const int32_t* q, const Quads& keys, int words, float* scores, Ahead& ahead,
                        unsigned asked) {
  Vec acc[R] = {};
  for (int w = 0; w < words; w += kQuadVectors) {
    ahead.ask(asked);
    const Quad quad = keys.read(w / kQuadVectors);
    for (int i = 0; i < kQuadVectors; ++i)
      for (int r = 0; r < R; ++r)
        acc[r] = PairWord::multiply_add(acc[r], PairWord::broadcast(q[r * words + w + i]),
                                        quad.vectors[i]);
  }
  for (int r = 0; r < R; ++r) store(scores + r * kTileKeys, acc[r]);
}

// Columns [begin, begin + 16 C) of `sums` [R, head_dim], plus weights, rows of a tile's, times the
// values of some groups.
template <class P, int R, int C>
inline void weigh_columns(const int32_t* weights, const SeenValues<P>* values, int count,
                          int head_dim, int begin, float* sums, Ahead& ahead, unsigned asked) {
  Vec acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = load(sums + r * head_dim + begin + c * kLanes);
  for (int group = 0; group < count; ++group, weights += kGroupTokens / 2) {
    for (int pair = 0; pair < kGroupTokens / 2; ++pair) {
      ahead.ask(asked);
      const auto right = values[group].template words<0>(head_dim, pair, begin);
      for (int r = 0; r < R; ++r) {
        const Vec left = PairWord::broadcast(weights[r * (kTileKeys / 2) + pair]);
        for (int c = 0; c < C; ++c) acc[r][c] = PairWord::multiply_add(acc[r][c], left, right(c));
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sums + r * head_dim + begin + c * kLanes, acc[r][c]);
}

template <class P, int R>
inline void weigh_rows(const int32_t* weights, const SeenValues<P>* values, int count, int head_dim,
                       float* sums, Ahead ahead) {
  if constexpr (R > 4) {
    weigh_rows<P, 4>(weights, values, count, head_dim, sums, ahead);
    weigh_rows<P, R - 4>(weights + 4 * (kTileKeys / 2), values, count, head_dim,
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
