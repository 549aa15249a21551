// Attention of up to eight query rows of each KV head by vectors, see few_groups.h.

#pragma once

#include <type_traits>

#include "few_sums.h"
#include "few_tile_sums.h"

#if defined(BATON_PAIRS)

namespace baton {

constexpr int kFewRows = 8;

// Computes the scores of R rows of a head with the keys of a tile; if R is more than four, the
// first four by themselves.
template <class P, int R>
void score_few(const FewGroups<P>& groups, Tile<PairWord>& tile, int head, int words) {
  constexpr int kFirst = R > 4 ? 4 : R, kRest = R - kFirst;
  const int stride = words * PairWord::kPasses;
  const PairType* q = tile.q + (size_t)head * R * stride;
  float* scores = tile.scores + (size_t)head * R * kTileKeys;
  const void* const* keys = groups.keys(head);
  if constexpr (std::is_same_v<P, Split>) {
    Ahead ahead = groups.ahead(keys), none;
    const unsigned asked = ahead.in_steps(groups.count() * words / kQuadVectors);
    for (int g = 0; g < groups.count(); ++g) {
      const Quads quads = groups.key(head, g).quads;
      score_quads<kFirst>(q, quads, words, scores + g * kLanes, ahead, asked);
      if constexpr (kRest > 0)
        score_quads<kRest>(q + kFirst * stride, quads, words,
                           scores + kFirst * kTileKeys + g * kLanes, none, 0);
    }
  } else {
    const auto by = [&](auto columns, int c, Ahead ahead) {
      score_groups<P, kFirst, columns>(q, keys + c, words, scores + c * kLanes, ahead);
      if constexpr (kRest > 0)
        score_groups<P, kRest, columns>(q + kFirst * stride, keys + c, words,
                                        scores + kFirst * kTileKeys + c * kLanes, Ahead());
    };
    if (groups.count() == kTileGroups)
      return by(std::integral_constant<int, kTileGroups>(), 0, groups.ahead(keys));
    for (int c = 0; c < groups.count(); ++c) by(std::integral_constant<int, 1>(), c, Ahead());
  }
}

// Adds the values of a tile to a head's sums; only keys in [begin, end) belong to the unit.
template <class P, int R>
void weigh_few(const FewGroups<P>& groups, Tile<PairWord>& tile, int head, int head_dim, int begin,
               int end) {
  SeenValues<P> values[kTileGroups];
  for (int g = 0; g < groups.count(); ++g) {
    const int first = g * kGroupTokens;
    const Group<P> group = groups.value(head, g);
    if constexpr (std::is_same_v<P, Split>) {
      values[g] = {group.quads, begin - first, end - first};
    } else {
      values[g] = {group.at};
      if (begin <= first && first + kGroupTokens <= end) continue;
      P* copy = (P*)tile.values + (size_t)first * head_dim;
      copy_values(group, head_dim, begin - first, end - first, copy);
      values[g] = {copy};
    }
  }
  const PairType* weights = tile.p + (size_t)head * R * (kTileKeys / PairWord::kPerWord);
  weigh_rows<P, R>(weights, values, groups.count(), head_dim,
                   tile.sums + (size_t)head * R * head_dim, groups.ahead(groups.values(head)));
}

// Attends to all keys of a unit with R rows of each head.
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
    soften(tile, 0, 0, rows, view, head_dim, call);
    for (int head = 0; head < unit.num_kv_heads; ++head)
      weigh_few<P, R>(groups, tile, head, head_dim, unit.first_key - first, unit.end_key - first);
  }
}

// Returns false for a unit with more rows.
template <class P>
bool attend_by_vectors(const AttentionCall& call, const Unit& unit, Tile<PairWord>& tile) {
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
