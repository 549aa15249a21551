// Paged, causal, grouped-query attention with an online softmax: one pass over the keys and values,
// each read once for all query heads that share them.
//
// A unit of work is a tile of queries of one segment, some neighbouring KV heads, and a range of
// keys. Its keys come in tiles of 64, packed on the way for the two products; keys outside the
// range, or their scores, are replaced by zeros, so they do not count. Neighbouring heads of a tile
// lie side by side in the pool, so that reading them in turn is one stream from memory. Online
// softmax: Milakov and Gimelshein, 2018 (https://arxiv.org/abs/1805.02867); the order of the loops:
// Dao 2023, FlashAttention-2 (https://arxiv.org/abs/2307.08691), and its split of long contexts,
// Flash-Decoding.

#pragma once

#include <type_traits>

#include "few_rows.h"
#include "normal_numbers.h"
#include "tiled_attention.h"
#include "token_keys.h"

namespace baton {

// Calls multiply(row, rows, keys) for the rows of a head in turn: they see the tile's first `keys`
// keys and no others. Later queries see more keys; rows that see none are left out.
template <class Action>
void for_seen(const View& view, const Action& multiply) {
  if (view.of(0).end == kTileKeys) return multiply(0, view.rows, kTileKeys);
  for (int row = 0; row < view.rows; row += kMaxRows) {
    const int count = view.rows - row < kMaxRows ? view.rows - row : kMaxRows;
    const int keys = view.of(row + count - 1).end;
    if (keys > 0) multiply(row, count, keys);
  }
}

// Adds one more tile of keys, which `at` points to, to the results of the unit's rows of one head;
// `later` is the next tile. Values are prefetched while the keys are in use, and the next keys
// while the values are.
template <class Keys, class Word>
void attend_tile(const AttentionCall& call, const Unit& unit, Tile<Word>& tile, Tiles&,
                 const Keys& at, const Keys& later, int head, int first) {
  using Words = typename Word::Type;
  constexpr int kKeyWords = kTileKeys / Word::kPerWord;
  const int head_dim = call.head_dim, padded = round_up(head_dim, kLanes);
  const int group = call.num_heads / call.num_kv_heads, rows = unit.num_queries * group;
  const View view{unit.position,  group,        rows, first,
                  unit.first_key, unit.end_key, call.window};
  const int words = padded / Word::kPerWord;
  const size_t row0 = (size_t)head * rows;
  const int per_row = Keys::lines_of(head_dim), lines = per_row * Keys::kRows, half = lines / 2;
  at.pack_keys(Ahead(at.v, 0, half, per_row), head_dim, (Words*)tile.keys);
  Ahead ahead(at.v, half, lines, per_row);
  for_seen(view, [&](int row, int count, int keys) {
    multiply<Word>(tile.q + (row0 + row) * words, words, tile.keys, kTileColumns,
                   tile.scores + (row0 + row) * kTileKeys, kTileKeys, count,
                   (keys + kLanes - 1) / kLanes, words, false, ahead);
    ahead = Ahead();
  });
  soften(tile, (int)row0, 0, rows, view, padded, call);
  at.pack_values(Ahead(later.k, 0, half, per_row), head_dim, padded, (Words*)tile.values);
  ahead = Ahead(later.k, half, lines, per_row);
  for_seen(view, [&](int row, int count, int keys) {
    multiply<Word>(tile.p + (row0 + row) * kKeyWords, kKeyWords, tile.values, padded / kLanes,
                   tile.sums + (row0 + row) * padded, padded, count, padded / kLanes,
                   Word::depth(keys), true, ahead);
    ahead = Ahead();
  });
}

// Writes a head's rows of a finished unit: to `out`, or to `partials` if the range is one of
// several splits.
template <class T, class Word>
void finish_head(const AttentionCall& call, const Unit& unit, const Tile<Word>& tile, int head) {
  const int head_dim = call.head_dim, padded = round_up(head_dim, kLanes);
  const int group = call.num_heads / call.num_kv_heads, rows = unit.num_queries * group;
  float* partial = call.partials +
                   ((int64_t)unit.partial + (int64_t)head * unit.partial_stride) * kLanes;
  for (int row = 0; row < rows; ++row) {
    const int at = head * rows + row;
    const float* sums = tile.sums + (size_t)at * padded;
    if (unit.partial >= 0) {
      float* to = partial + (int64_t)row * (padded + kLanes);
      to[0] = tile.highest[at];
      to[1] = sum(tile.totals[at]);
      std::memcpy(to + kLanes, sums, (size_t)padded * 4);
      continue;
    }
    T* to = row_of((T*)call.out, call, (int64_t)call.num_heads * head_dim, unit, head, row);
    const int query_head = (unit.kv_head + head) * group + row % group;
    const float share =
        1.0f / (sum(tile.totals[at]) + sink_weight(call, query_head, tile.highest[at]));
    int d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) store(to + d, load(sums + d) * share);
    if (d < head_dim) store_some(to + d, load(sums + d) * share, head_dim - d);
  }
}

// Attends to all keys of a unit, tile by tile.
template <class Keys, class Word>
void attend_tiles(const AttentionCall& call, const Unit& unit, Tile<Word>& tile, Tiles& tiles) {
  Keys found[2];
  int turn = 0, first = Keys::first_of(unit.first_key);
  found[0].find(call, unit, 0, first, tile.zeros);
  for (; first < unit.end_key; first += kTileKeys)
    for (int head = 0; head < unit.num_kv_heads; ++head, turn ^= 1) {
      const bool last = head + 1 == unit.num_kv_heads;
      Keys& next = found[turn ^ 1];
      next.find(call, unit, last ? 0 : head + 1, last ? first + kTileKeys : first, tile.zeros);
      attend_tile(call, unit, tile, tiles, found[turn], next, head, first);
    }
}

// Attends to all keys of a unit that has few rows of a head; returns false for any other unit.
template <class P, class Word>
bool attend_few([[maybe_unused]] const AttentionCall& call, [[maybe_unused]] const Unit& unit,
                [[maybe_unused]] Tile<Word>& tile, [[maybe_unused]] Tiles& tiles) {
#if defined(BATON_PAIRS)
  if constexpr (Word::kIsPairs) {
    if (attend_by_vectors<P>(call, unit, tile)) return true;
#if defined(__AMX_BF16__)
    return attend_by_tiles<P>(call, unit, tile, tiles);
#endif
  }
#endif
  return false;
}

template <class P, class Word>
void attend_keys(const AttentionCall& call, const Unit& unit, Tile<Word>& tile, Tiles& tiles) {
  if (attend_few<P>(call, unit, tile, tiles)) return;
#if defined(BATON_PAIRS)
  if constexpr (Word::kIsPairs) {
    if (call.is_paired) return attend_tiles<PairedKeys<P>>(call, unit, tile, tiles);
  }
#endif
  if constexpr (!std::is_same_v<P, Split>) attend_tiles<TokenKeys<P>>(call, unit, tile, tiles);
}

template <class T, class P, class Word>
void attend_unit(const AttentionCall& call, const Unit& unit, Arena& arena, Tiles& tiles) {
  // Set once for all sums of a unit: changing it takes as long as summing dozens of words.
  [[maybe_unused]] const std::conditional_t<Word::kIsPairs, NormalNumbers, char> numbers{};
  const int head_dim = call.head_dim, padded = round_up(head_dim, kLanes);
  const int rows = unit.num_queries * (call.num_heads / call.num_kv_heads);
  const int words = padded / Word::kPerWord, all_rows = rows * unit.num_kv_heads;
  Tile<Word> tile = carve<Word>(arena, all_rows, padded);
  for (int at = 0; at < all_rows; ++at) {
    const T* from = row_of((const T*)call.q, call, call.q_stride, unit, at / rows, at % rows);
    pack_query(from, head_dim, padded, tile.q + (size_t)at * words);
    tile.highest[at] = -INFINITY;
    tile.totals[at] = Vec{};
  }
  std::memset(tile.sums, 0, (size_t)all_rows * padded * 4);
  if (padded != head_dim) std::memset((void*)tile.keys, 0, (size_t)words * kTileKeys * 4);

  attend_keys<P>(call, unit, tile, tiles);
  for (int head = 0; head < unit.num_kv_heads; ++head) finish_head<T>(call, unit, tile, head);
}

// Merges the splits of one tile of queries, weighted by their totals relative to the common
// maximum.
template <class T>
void merge_splits(const AttentionCall& call, const Merge& merge) {
  const int head_dim = call.head_dim, padded = round_up(head_dim, kLanes);
  const int group = call.num_heads / call.num_kv_heads, rows = merge.num_queries * group;
  const int64_t row_size = padded + kLanes, split_size = rows * row_size;
  for (int row = 0; row < rows; ++row) {
    const float* from = call.partials + (int64_t)merge.partial * kLanes + row * row_size;
    float highest = -INFINITY, total = 0;
    for (int s = 0; s < merge.num_splits; ++s)
      highest = from[s * split_size] > highest ? from[s * split_size] : highest;
    for (int s = 0; s < merge.num_splits; ++s)
      total += std::exp2(from[s * split_size] - highest) * from[s * split_size + 1];
    total += sink_weight(call, merge.kv_head * group + row % group, highest);
    T* to = (T*)call.out + ((int64_t)(merge.token + row / group) * call.num_heads +
                            merge.kv_head * group + row % group) * head_dim;
    for (int d = 0; d < head_dim; d += kLanes) {
      Vec sum{};
      for (int s = 0; s < merge.num_splits; ++s) {
        const float* split = from + s * split_size;
        sum += load(split + kLanes + d) * std::exp2(split[0] - highest);
      }
      const int count = head_dim - d < kLanes ? head_dim - d : kLanes;
      if (count == kLanes) store(to + d, sum / total);
      else store_some(to + d, sum / total, count);
    }
  }
}

template <class T, class P>
void write_token(const AttentionCall& call, int64_t token) {
  const int64_t block = call.slots[2 * token], offset = call.slots[2 * token + 1];
  const int64_t within = call.is_paired ? offset % kLanes : 0;
  P* to = (P*)call.pool + block * call.block_stride + (offset - within) * call.head_dim;
  const T* k = (const T*)call.k + token * call.kv_stride;
  const T* v = (const T*)call.v + token * call.kv_stride;
  for (int head = 0; head < call.num_kv_heads; ++head) {
#if defined(BATON_PAIRS)
    if constexpr (std::is_same_v<T, Bf16>) {
      if (call.is_paired)
        write_paired(k, v, call.head_dim, (int)within, to, to + call.value_offset);
    }
#endif
    if (!call.is_paired) {
      copy_head(k, call.head_dim, to);
      copy_head(v, call.head_dim, to + call.value_offset);
    }
    k += call.head_dim;
    v += call.head_dim;
    to += call.head_stride;
  }
}

#if defined(BATON_PAIRS)
template <>
inline void write_token<Bf16, Split>(const AttentionCall& call, int64_t token) {
  const int64_t block = call.slots[2 * token], offset = call.slots[2 * token + 1];
  const int64_t from = token * call.kv_stride;
  for (int head = 0; head < call.num_kv_heads; ++head)
    write_split_token(call, (const Bf16*)call.k + from + head * call.head_dim,
                      (const Bf16*)call.v + from + head * call.head_dim, block, head, (int)offset);
}

// Writes sixteen tokens from this one on, which are a whole group of each head.
template <class P>
void write_sixteen(const AttentionCall& call, int64_t token) {
  const int64_t *slot = call.slots + 2 * token, from = token * call.kv_stride;
  const int head_dim = call.head_dim;
  for (int head = 0; head < call.num_kv_heads; ++head) {
    const Bf16* k = (const Bf16*)call.k + from + head * head_dim;
    const Bf16* v = (const Bf16*)call.v + from + head * head_dim;
    if constexpr (std::is_same_v<P, Split>) {
      write_split_group(call, k, v, call.kv_stride, slot[0], head, (int)slot[1]);
    } else {
      P* to = (P*)call.pool + slot[0] * call.block_stride + head * call.head_stride +
              slot[1] * head_dim;
      write_group(k, v, call.kv_stride, head_dim, to, to + call.value_offset);
    }
  }
}
#endif

// How many tokens are written together with this one: for the first token of a whole group all of
// the group, for the group's other tokens none; any other token is written by itself.
template <class P>
int written_with(const AttentionCall& call, int64_t token) {
  if (!call.is_paired || sizeof(P) != sizeof(Bf16)) return 1;
  const int64_t* at = call.slots + 2 * token;
  const int64_t first = token - at[1] % kLanes, last = first + kLanes - 1;
  const int64_t begin = at[1] - at[1] % kLanes;
  const auto is_at = [&](int64_t other, int64_t offset) {
    return call.slots[2 * other] == at[0] && call.slots[2 * other + 1] == offset;
  };
  if (first < 0 || last >= call.num_tokens || !is_at(first, begin) ||
      !is_at(last, begin + kLanes - 1))
    return 1;
  return token == first ? kLanes : 0;
}

// Writes the keys and values of the tokens that are written with this one, after `prepare` was
// called for each.
template <class T, class P, class Prepare>
void write_tokens(const AttentionCall& call, int64_t token, const Prepare& prepare) {
  const int count = written_with<P>(call, token);
  for (int i = 0; i < count; ++i) prepare(token + i);
  if (count == 1) write_token<T, P>(call, token);
#if defined(BATON_PAIRS)
  if constexpr (std::is_same_v<T, Bf16> && sizeof(P) == sizeof(Bf16)) {
    if (count == kLanes) write_sixteen<P>(call, token);
  }
#endif
}

// Everything but the writing of K and V. All threads of a parallel region call it.
template <class T, class P, class Word>
void attend_planned(const AttentionCall& call) {
  const Unit* units = (const Unit*)call.units;
  const Merge* merges = (const Merge*)call.merges;
  static thread_local Arena arena;
  Tiles tiles;
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = 0; i < call.num_units; ++i)
    attend_unit<T, P, Word>(call, units[i], arena, tiles);
  if (call.num_merges == 0) return;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < call.num_merges; ++i) merge_splits<T>(call, merges[i]);
}

template <class T, class P, class Word>
void attend(const AttentionCall& call) {
#pragma omp parallel num_threads(call.num_threads)
  {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < call.num_tokens; ++token)
      write_tokens<T, P>(call, token, [](int64_t) {});
    attend_planned<T, P, Word>(call);
  }
}

// Each is compiled in a file of its own, because together they take long to compile.
#if defined(BATON_PAIRS)
using Bf16Word = PairWord;
extern template void attend_planned<Bf16, Split, Bf16Word>(const AttentionCall&);
#else
using Bf16Word = FloatWord;
#endif
extern template void attend_planned<Bf16, Bf16, Bf16Word>(const AttentionCall&);
extern template void attend_planned<Bf16, Fp8, Bf16Word>(const AttentionCall&);
extern template void attend_planned<float, float, FloatWord>(const AttentionCall&);
extern template void attend_planned<float, Fp8, FloatWord>(const AttentionCall&);

}  // namespace baton
