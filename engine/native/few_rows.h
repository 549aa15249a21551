// Attention of up to eight query rows of each KV head by vectors, see few_groups.h.

#pragma once

#include <type_traits>

#include "few_groups.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace baton {

constexpr int kFewRows = 8;

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

template <class P, int R>
void score_few(const FewGroups<P>& groups, Tile<PairWord>& tile, int head, int words) {
  constexpr int kFirst = R > 4 ? 4 : R, kRest = R - kFirst;
  const int32_t* q = tile.q + (size_t)head * R * words;
  float* scores = tile.scores + (size_t)head * R * kTileKeys;
  const void* const* keys = groups.keys(head);
  const auto by = [&](auto columns, int c, Ahead ahead) {
    score_groups<P, kFirst, columns>(q, keys + c, words, scores + c * kLanes, ahead);
    if constexpr (kRest > 0)
      score_groups<P, kRest, columns>(q + kFirst * words, keys + c, words,
                                      scores + kFirst * kTileKeys + c * kLanes, Ahead());
  };
  if (groups.count() == kTileGroups)
    return by(std::integral_constant<int, kTileGroups>(), 0, groups.ahead(keys));
  for (int c = 0; c < groups.count(); ++c) by(std::integral_constant<int, 1>(), c, Ahead());
}

// Columns [begin, begin + 16 C) of `sums` [R, head_dim], plus weights, rows of a tile's, times the
// values of some groups.
template <class P, int R, int C>
inline void weigh_columns(const int32_t* weights, const void* const* values, int count, int head_dim,
                          int begin, float* sums, Ahead& ahead, unsigned asked) {
  Vec acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = load(sums + r * head_dim + begin + c * kLanes);
  for (int group = 0; group < count; ++group, weights += kGroupTokens / 2) {
    const P* at = (const P*)values[group] + begin * 2;
    for (int pair = 0; pair < kGroupTokens / 2; ++pair, at += head_dim * 2) {
      ahead.ask(asked);
      Vec right[C];
      for (int c = 0; c < C; ++c) right[c] = read_words(at + c * kLanes * 2);
      for (int r = 0; r < R; ++r) {
        const Vec left = PairWord::broadcast(weights[r * (kTileKeys / 2) + pair]);
        for (int c = 0; c < C; ++c) acc[r][c] = PairWord::multiply_add(acc[r][c], left, right[c]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sums + r * head_dim + begin + c * kLanes, acc[r][c]);
}

template <class P, int R>
inline void weigh_rows(const int32_t* weights, const void* const* values, int count, int head_dim,
                       float* sums, Ahead ahead) {
  if constexpr (R > 4) {
    weigh_rows<P, 4>(weights, values, count, head_dim, sums, ahead);
    weigh_rows<P, R - 4>(weights + 4 * (kTileKeys / 2), values, count, head_dim,
                         sums + 4 * head_dim, Ahead());
  } else {
    constexpr int kColumns = R <= 2 ? 8 : 4;
    const int vectors = head_dim / kLanes;
    const int passes = vectors / kColumns + vectors % kColumns / 4 + vectors % 4;
    const unsigned asked = ahead.in_steps(passes * count * kGroupTokens / 2);
    int d = 0;
    for (; d + kColumns * kLanes <= head_dim; d += kColumns * kLanes)
      weigh_columns<P, R, kColumns>(weights, values, count, head_dim, d, sums, ahead, asked);
    for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes)
      weigh_columns<P, R, 4>(weights, values, count, head_dim, d, sums, ahead, asked);
    for (; d < head_dim; d += kLanes)
      weigh_columns<P, R, 1>(weights, values, count, head_dim, d, sums, ahead, asked);
  }
}

// What the values of a tile add to a head's sums; its keys in [begin, end) are the unit's.
template <class P, int R>
void weigh_few(const FewGroups<P>& groups, Tile<PairWord>& tile, int head, int head_dim, int begin,
               int end) {
  const void* values[kTileGroups];
  for (int g = 0; g < groups.count(); ++g) {
    values[g] = groups.values(head)[g];
    const int first = g * kGroupTokens;
    if (begin <= first && first + kGroupTokens <= end) continue;
    P* copy = (P*)tile.values + (size_t)first * head_dim;
    copy_values((const P*)values[g], head_dim, begin - first, end - first, copy);
    values[g] = copy;
  }
  weigh_rows<P, R>(tile.p + (size_t)head * R * (kTileKeys / 2), values, groups.count(), head_dim,
                   tile.sums + (size_t)head * R * head_dim, groups.ahead(groups.values(head)));
}

// All keys of a unit with R rows of each head.
template <class P, int R>
void attend_rows(const AttentionCall& call, const Unit& unit, Tile<PairWord>& tile) {
  const int head_dim = call.head_dim, rows = unit.num_kv_heads * R;
  for (int first = PairedKeys<P>::first_of(unit.first_key); first < unit.end_key;
       first += kTileKeys) {
    const FewGroups<P> groups(call, unit, first);
    for (int head = 0; head < unit.num_kv_heads; ++head)
      score_few<P, R>(groups, tile, head, head_dim / 2);
    const View view{unit.position, call.num_heads / call.num_kv_heads, R, first, unit.first_key,
                    unit.end_key,  call.window};
    soften(tile, 0, 0, rows, view, head_dim, call.scale);
    for (int head = 0; head < unit.num_kv_heads; ++head)
      weigh_few<P, R>(groups, tile, head, head_dim, unit.first_key - first, unit.end_key - first);
  }
}

template <class P>
bool attend_few(const AttentionCall& call, const Unit& unit, Tile<PairWord>& tile, Tiles&) {
  static constexpr decltype(&attend_rows<P, 1>) kByRows[kFewRows] = {
      attend_rows<P, 1>, attend_rows<P, 2>, attend_rows<P, 3>, attend_rows<P, 4>,
      attend_rows<P, 5>, attend_rows<P, 6>, attend_rows<P, 7>, attend_rows<P, 8>};
  const int rows = unit.num_queries * (call.num_heads / call.num_kv_heads);
  if (!call.is_paired || rows > kFewRows || unit.num_kv_heads > kFewHeads) return false;
  kByRows[rows - 1](call, unit, tile);
  return true;
}

}  // namespace baton

#endif
