// Paged, causal, grouped-query attention with an online softmax: one pass over the keys and
// values, each read once for all query heads that share them.
//
// A unit of work is a tile of queries of one segment, some neighbouring KV heads, and a range of
// keys. Its keys come in tiles of 64, packed on the way for the two products; what lies outside the
// range is replaced by zeros and never read. Neighbouring heads of a tile lie side by side in the
// pool: read in turn, they are one stream to the memory. Online softmax: Milakov and Gimelshein,
// 2018 (https://arxiv.org/abs/1805.02867); the order of the loops: Dao 2023, FlashAttention-2
// (https://arxiv.org/abs/2307.08691), and its split of long contexts, Flash-Decoding.

#pragma once

#include "few_rows.h"

namespace baton {

// Keys of a tile that a row sees: those in [begin, end).
struct Seen {
  int begin;
  int end;
};

// What the rows of a head see of the tile of keys from `first` on.
struct View {
  int position;  // of the first query
  int group;     // rows of a query
  int rows;
  int first;
  int end_key;
  int window;

  Seen of(int row) const {
    const int query = position + (rows == group ? 0 : row / group);  // decode divides nothing
    const int end = (query + 1 < end_key ? query + 1 : end_key) - first;
    const int begin = window > 0 ? query - window + 1 - first : 0;
    return {begin, end < kTileKeys ? end : kTileKeys};
  }
};

// Column j of a row, `other` where a key is not seen.
inline Vec seen_only(Vec x, int j, Seen seen, float other) {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const IntVec key = lane + j * kLanes;
  return select((key >= seen.begin) & (key < seen.end), x, splat(other));
}

// Weights are relative to a score, whose own is 1, and none is larger than 2^kSlack: when one would be,
// its score becomes that score, and what was summed so far follows. Most rows settle with their first
// tile.
constexpr float kSlack = 8.0f;

// Scores of up to 16 rows over a tile become weights; `sums` and `totals` follow where a reference
// has grown. Of a whole tile every row sees every key. The largest scores are found of all rows at
// once: a row by itself waits for its own.
template <class Word, bool kWhole>
void soften_rows(Tile<Word>& tile, int row0, int rows, const Seen* seen, int padded, float scale) {
  const float* scores = tile.scores + (size_t)row0 * kTileKeys;
  Vec tops[kLanes];
  for (int i = 0; i < kLanes; ++i) tops[i] = splat(-INFINITY);
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < kTileColumns; ++j) {
      const Vec s = load(scores + i * kTileKeys + j * kLanes);
      tops[i] = larger(kWhole ? s : seen_only(s, j, seen[i], -INFINITY), tops[i]);
    }
  float* highest = tile.highest + row0;
  const Vec top = largest_of_each(tops, rows) * scale, before = load(highest);
  const IntVec grows = top > before + kSlack;
  const Vec reference = select(grows, top, before);
  if (any(grows)) {
    const Vec shrink = exp2_bounded<false>(before - reference);
    store(highest, reference);  // rows beyond these stay as they are
    for (int i = 0; i < rows; ++i) {
      if (!grows[i] || before[i] == -INFINITY) continue;  // nothing is summed yet
      float* sums = tile.sums + (size_t)(row0 + i) * padded;
      for (int d = 0; d < padded; d += kLanes) store(sums + d, load(sums + d) * shrink[i]);
      tile.totals[row0 + i] *= shrink[i];
    }
  }
  for (int i = 0; i < rows; ++i) {
    const bool sees_none = highest[i] == -INFINITY;  // so far
    const float unit_score = sees_none ? 0.0f : highest[i];
    Vec weights[kTileColumns], total{};
    for (int j = 0; j < kTileColumns; ++j) {
      const Vec s = load(scores + i * kTileKeys + j * kLanes) * scale - unit_score;
      weights[j] = exp2_bounded<Word::kPerWord == 2>(s);
      if (!kWhole) weights[j] = seen_only(weights[j], j, seen[i], 0.0f);
      total += weights[j];
    }
    store_weights(tile.p + (size_t)(row0 + i) * (kTileKeys / Word::kPerWord), weights);
    tile.totals[row0 + i] += total;
  }
}

// The same of all rows of a head.
template <class Word>
void soften(Tile<Word>& tile, int row0, const View& view, int padded, float scale) {
  for (int row = 0; row < view.rows; row += kLanes) {
    const int count = view.rows - row < kLanes ? view.rows - row : kLanes;
    if (view.of(row).end == kTileKeys && view.of(row + count - 1).begin <= 0) {
      soften_rows<Word, true>(tile, row0 + row, count, nullptr, padded, scale);
      continue;
    }
    Seen seen[kLanes];
    for (int i = 0; i < count; ++i) seen[i] = view.of(row + i);
    soften_rows<Word, false>(tile, row0 + row, count, seen, padded, scale);
  }
}

template <class P>
struct KeyRows {
  const void* k[kTileKeys];
  const void* v[kTileKeys];

  // Where a head's keys from `first` lie; zeros from the unit's end on.
  void find(const AttentionCall& call, const Unit& unit, int head, int first, const void* zeros) {
    const int end = unit.end_key;
    const P* pool = (const P*)call.pool +
                    (int64_t)(unit.kv_head + head) * call.block_size * call.head_dim;
    const int count = end - first < kTileKeys ? (end > first ? end - first : 0) : kTileKeys;
    int64_t table = unit.table + first / call.block_size;
    int offset = first % call.block_size;
    for (int j = 0; j < count; ++table, offset = 0) {
      const P* at = pool + call.tables[table] * call.block_stride + (int64_t)offset * call.head_dim;
      const int here = call.block_size - offset < count - j ? call.block_size - offset : count - j;
      for (const int stop = j + here; j < stop; ++j, at += call.head_dim) {
        k[j] = at;
        v[j] = at + call.value_offset;
      }
    }
    for (int j = count; j < kTileKeys; ++j) k[j] = v[j] = zeros;
  }
};

// Calls multiply(row, rows, keys) for the rows of a head in turn: `keys` of the tile, the first ones,
// are all that they see. Later queries see more; rows that see none are left out.
template <class Action>
void for_seen(const View& view, const Action& multiply) {
  if (view.of(0).end == kTileKeys) return multiply(0, view.rows, kTileKeys);
  for (int row = 0; row < view.rows; row += kMaxRows) {
    const int count = view.rows - row < kMaxRows ? view.rows - row : kMaxRows;
    const int keys = view.of(row + count - 1).end;
    if (keys > 0) multiply(row, count, keys);
  }
}

// The unit's rows of one head after one more tile of its keys, which `at` points to; `later` will
// be next. Values are asked for while the keys are in use, and the next keys while the values are.
template <class P, class Word>
void attend_tile(const AttentionCall& call, const Unit& unit, Tile<Word>& tile,
                 const KeyRows<P>& at, const KeyRows<P>& later, int head, int first) {
  using Words = typename Word::Type;
  constexpr int kKeyWords = kTileKeys / Word::kPerWord;
  const int head_dim = call.head_dim, padded = round_up(head_dim, kLanes);
  const int group = call.num_heads / call.num_kv_heads, rows = unit.num_queries * group;
  const View view{unit.position, group, rows, first, unit.end_key, call.window};
  const int words = padded / Word::kPerWord;
  const size_t row0 = (size_t)head * rows;
  const int per_row = (head_dim * (int)sizeof(P) + 63) / 64;
  const int lines = per_row * kTileKeys, half = lines / 2;
  pack_keys<P>(at.k, Ahead(at.v, 0, half, per_row), head_dim, (Words*)tile.keys);
  Ahead ahead(at.v, half, lines, per_row);
  for_seen(view, [&](int row, int count, int keys) {
    multiply<Word>(tile.q + (row0 + row) * words, words, tile.keys, kTileColumns,
                   tile.scores + (row0 + row) * kTileKeys, kTileKeys, count,
                   (keys + kLanes - 1) / kLanes, words, false, ahead);
    ahead = Ahead();
  });
  soften(tile, (int)row0, view, padded, call.scale);
  pack_values<P>(at.v, Ahead(later.k, 0, half, per_row), head_dim, padded, (Words*)tile.values);
  ahead = Ahead(later.k, half, lines, per_row);
  for_seen(view, [&](int row, int count, int keys) {
    multiply<Word>(tile.p + (row0 + row) * kKeyWords, kKeyWords, tile.values, padded / kLanes,
                   tile.sums + (row0 + row) * padded, padded, count, padded / kLanes,
                   (keys + Word::kPerWord - 1) / Word::kPerWord, true, ahead);
    ahead = Ahead();
  });
}

// A head's rows of a finished unit: to `out`, or to `partials` where other splits follow.
template <class T, class Word>
void finish_head(const AttentionCall& call, const Unit& unit, const Tile<Word>& tile, int head) {
  const int head_dim = call.head_dim, padded = round_up(head_dim, kLanes);
  const int rows = unit.num_queries * (call.num_heads / call.num_kv_heads);
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
    const float share = 1.0f / sum(tile.totals[at]);
    int d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) store(to + d, load(sums + d) * share);
    if (d < head_dim) store_some(to + d, load(sums + d) * share, head_dim - d);
  }
}

// All keys of a unit, tile by tile.
template <class P, class Word>
void attend_tiles(const AttentionCall& call, const Unit& unit, Tile<Word>& tile) {
  KeyRows<P> found[2];
  int turn = 0;
  found[0].find(call, unit, 0, unit.first_key, tile.zeros);
  for (int first = unit.first_key; first < unit.end_key; first += kTileKeys)
    for (int head = 0; head < unit.num_kv_heads; ++head, turn ^= 1) {
      const bool last = head + 1 == unit.num_kv_heads;
      KeyRows<P>& next = found[turn ^ 1];
      next.find(call, unit, last ? 0 : head + 1, last ? first + kTileKeys : first, tile.zeros);
      attend_tile<P, Word>(call, unit, tile, found[turn], next, head, first);
    }
}

template <class T, class P, class Word>
void attend_unit(const AttentionCall& call, const Unit& unit, Arena& arena) {
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

  if (!attend_few<P>(call, unit, tile)) attend_tiles<P>(call, unit, tile);
  for (int head = 0; head < unit.num_kv_heads; ++head) finish_head<T>(call, unit, tile, head);
}

// The splits of one tile of queries, weighed by their totals under the common maximum.
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

template <class T>
void copy_head(const T* from, int head_dim, T* to) {
  std::memcpy(to, from, (size_t)head_dim * sizeof(T));
}

template <class T>
void copy_head(const T* from, int head_dim, Fp8* to) {
  int d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(to + d, load(from + d));
  if (d < head_dim) store_some(to + d, load_some(from + d, head_dim - d), head_dim - d);
}

template <class T, class P>
void write_token(const AttentionCall& call, int64_t token) {
  const int64_t block = call.slots[2 * token], offset = call.slots[2 * token + 1];
  P* slot = (P*)call.pool + block * call.block_stride + offset * call.head_dim;
  for (int head = 0; head < call.num_kv_heads; ++head) {
    const int64_t from = token * call.kv_stride + (int64_t)head * call.head_dim;
    P* to = slot + (int64_t)head * call.block_size * call.head_dim;
    copy_head((const T*)call.k + from, call.head_dim, to);
    copy_head((const T*)call.v + from, call.head_dim, to + call.value_offset);
  }
}

// Within a parallel region, by all of its threads: everything but the writing of K and V.
template <class T, class P, class Word>
void attend_planned(const AttentionCall& call) {
  const Unit* units = (const Unit*)call.units;
  const Merge* merges = (const Merge*)call.merges;
  static thread_local Arena arena;
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = 0; i < call.num_units; ++i) attend_unit<T, P, Word>(call, units[i], arena);
  if (call.num_merges == 0) return;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < call.num_merges; ++i) merge_splits<T>(call, merges[i]);
}

template <class T, class P, class Word>
void attend(const AttentionCall& call) {
#pragma omp parallel num_threads(call.num_threads)
  {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < call.num_tokens; ++token) write_token<T, P>(call, token);
    attend_planned<T, P, Word>(call);
  }
}

}  // namespace baton
