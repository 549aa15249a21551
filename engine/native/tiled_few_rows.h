// Attention of up to sixteen query rows of each KV head by tiles, see few_groups.h: groups are right
// sides as they lie.

#pragma once

#include "few_groups.h"

#if defined(__AMX_BF16__)

namespace baton {

constexpr int kFewRows = kTileRows;
constexpr int kValueWords = kGroupTokens / 2;  // of a product: one group, which lies by itself

// Words of a product of queries and keys, of which a head has `words`.
inline int score_words(int words) { return words % kTileWords == 0 ? kTileWords : kTileWords / 2; }

// A group as it lies, or from e4m3 to `to`.
inline const char* as_bf16(const Bf16* from, int, char*) { return (const char*)from; }

inline const char* as_bf16(const Fp8* from, int head_dim, char* to) {
  for (int i = 0; i < kGroupTokens * head_dim; i += 32) *(Vec*)(to + i * 2) = read_words(from + i);
  return to;
}

// Scores of a head's rows with the keys of a tile.
template <class P>
void score_few(const FewGroups<P>& groups, Tile<PairWord>& tile, int head, int rows, int head_dim) {
  const int words = head_dim / 2, step = score_words(words), count = groups.count();
  const char* keys[kTileGroups];
  for (int g = 0; g < count; ++g)
    keys[g] = as_bf16((const P*)groups.keys(head)[g], head_dim,
                      (char*)tile.keys + group_bytes<Bf16>(head_dim) * g);
  Ahead ahead = groups.ahead(groups.keys(head));
  const unsigned asked = ahead.in_steps(words / step);
  const int32_t* q = tile.q + (size_t)head * rows * words;
  float* scores = tile.scores + (size_t)head * rows * kTileKeys;
  for_sums<4>(count, [](auto i) BATON_INLINE { tile_zero<i>(); });
  for (int w = 0; w < words; w += step) {
    ahead.ask(asked);
    tile_load<4>(q + w, words * 4);
    for_sums<4>(count, [&](auto i) BATON_INLINE {
      tile_load<6 + i % 2>(keys[i] + w * 64, 64);
      tile_multiply<i, 4, 6 + i % 2>();
    });
  }
  for_sums<4>(count, [&](auto i) BATON_INLINE {
    tile_store<i>(scores + i * kLanes, kTileKeys * 4);
  });
}

// What the values of a tile add to a head's sums; its keys in [begin, end) are the unit's.
template <class P>
void weigh_few(const FewGroups<P>& groups, Tile<PairWord>& tile, int head, int rows, int head_dim,
               int begin, int end) {
  const int count = groups.count(), vectors = head_dim / kLanes;
  const char* values[kTileGroups];
  for (int g = 0; g < count; ++g) {
    const P* from = (const P*)groups.values(head)[g];
    char* copy = (char*)tile.values + group_bytes<Bf16>(head_dim) * g;
    const int first = g * kGroupTokens;
    if (begin <= first && first + kGroupTokens <= end) {
      values[g] = as_bf16(from, head_dim, copy);
    } else {
      copy_seen(from, head_dim, begin - first, end - first, (Vec*)copy);
      values[g] = copy;
    }
  }
  Ahead ahead = groups.ahead(groups.values(head));
  const unsigned asked = ahead.in_steps((vectors + 3) / 4 * count);
  const int32_t* weights = tile.p + (size_t)head * rows * (kTileKeys / 2);
  float* sums = tile.sums + (size_t)head * rows * head_dim;
  for (int v = 0; v < vectors; v += 4, sums += 4 * kLanes) {
    const int columns = vectors - v < 4 ? vectors - v : 4;
    for_sums<4>(columns, [&](auto i) BATON_INLINE { tile_load<i>(sums + i * kLanes, head_dim * 4); });
    for (int g = 0; g < count; ++g) {
      ahead.ask(asked);
      tile_load<4>(weights + g * kValueWords, kTileKeys * 2);
      for_sums<4>(columns, [&](auto i) BATON_INLINE {
        tile_load<6 + i % 2>(values[g] + (v + i) * 64, head_dim * 4);
        tile_multiply<i, 4, 6 + i % 2>();
      });
    }
    for_sums<4>(columns, [&](auto i) BATON_INLINE { tile_store<i>(sums + i * kLanes, head_dim * 4); });
  }
}

template <class P>
bool attend_few(const AttentionCall& call, const Unit& unit, Tile<PairWord>& tile, Tiles& tiles) {
  const int group = call.num_heads / call.num_kv_heads, rows = unit.num_queries * group;
  if (!call.is_paired || rows > kFewRows || unit.num_kv_heads > kFewHeads) return false;
  const int head_dim = call.head_dim, heads = unit.num_kv_heads;
  for (int first = PairedKeys<P>::first_of(unit.first_key); first < unit.end_key;
       first += kTileKeys) {
    const FewGroups<P> groups(call, unit, first);
    tiles.shape(rows, rows, score_words(head_dim / 2));
    for (int head = 0; head < heads; ++head) score_few(groups, tile, head, rows, head_dim);
    const View view{unit.position, group, rows, first, unit.first_key, unit.end_key, call.window};
    soften(tile, 0, heads * rows, view, head_dim, call.scale);
    tiles.shape(rows, rows, kValueWords);
    for (int head = 0; head < heads; ++head)
      weigh_few(groups, tile, head, rows, head_dim, unit.first_key - first, unit.end_key - first);
  }
  return true;
}

}  // namespace baton

#endif
