// Paged, causal, grouped-query attention with an online softmax: one pass over the keys and
// values, each read once for all query heads that share them.
//
// A unit of work is a tile of queries of one segment, one KV head, and a range of keys. Its keys
// come in tiles of 64, packed on the way for the two products; what lies outside the range is
// replaced by zeros and never read. Online softmax: Milakov and Gimelshein 2018
// (https://arxiv.org/abs/1805.02867); the order of the loops: Dao 2023, FlashAttention-2
// (https://arxiv.org/abs/2307.08691), and its split of long contexts, Flash-Decoding.

#pragma once

#include <cmath>
#include <cstdlib>
#include <new>

#include "simd.h"

namespace baton {

constexpr int kTileKeys = 64;
constexpr int kTileColumns = kTileKeys / kLanes;

// Mirrors `_Call` in cpu_backend.py. Strides count elements.
struct AttentionCall {
  void* pool;               // of this layer, block 0
  const void* q;            // [tokens, heads, head_dim], tokens q_stride apart
  const void* k;            // [tokens, kv_heads, head_dim], tokens kv_stride apart
  const void* v;
  void* out;                // [tokens, heads, head_dim]
  const int64_t* slots;     // [tokens, 2]: block, offset in it
  const int32_t* units;     // [num_units, 8], see Unit
  const int32_t* merges;    // [num_merges, 5], see Merge
  const int64_t* tables;    // blocks of all segments
  float* partials;          // of the units that are one of several splits
  int64_t q_stride;
  int64_t kv_stride;
  int64_t block_stride;     // between blocks of the pool
  int64_t value_offset;     // from a block's keys to its values
  int64_t num_tokens;
  int64_t num_units;
  int64_t num_merges;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t window;           // 0: none
  int32_t is_bf16;
  int32_t num_threads;
  float scale;
};

struct Unit {
  int32_t token;       // the first query's row in q
  int32_t num_queries;
  int32_t position;    // the first query's
  int32_t kv_head;
  int32_t first_key;   // of the range
  int32_t end_key;
  int32_t table;       // index into tables of the segment's first block
  int32_t partial;     // where in `partials`, in 16 floats; -1: the only split
};

struct Merge {
  int32_t token;
  int32_t num_queries;
  int32_t kv_head;
  int32_t num_splits;
  int32_t partial;     // of the first split, in 16 floats; the others follow
};

// Memory of one thread for one unit: all of it is written before it is read.
template <class Word>
struct Tile {
  typename Word::Type* q;  // [rows, words of a padded head]
  typename Word::Type* p;  // [rows, words of 64 keys]
  Vec* keys;               // [words of a head, 4]
  Vec* values;             // [words of 64 keys, vectors of a head]
  float* scores;           // [rows, 64]
  float* sums;             // [rows, padded head]
  float* highest;          // [rows]
  float* totals;           // [rows]
  void* zeros;             // one head
};

inline int round_up(int n, int step) { return (n + step - 1) / step * step; }

class Arena {
 public:
  ~Arena() { std::free(memory_); }
  void reserve(size_t bytes) {
    if (bytes <= size_) return;
    std::free(memory_);
    size_ = (bytes + 4095) / 4096 * 4096;
    memory_ = static_cast<char*>(std::aligned_alloc(64, size_));
    if (memory_ == nullptr) std::abort();  // nothing sensible is left to do in a parallel region
  }
  char* data() { return memory_; }

 private:
  char* memory_ = nullptr;
  size_t size_ = 0;
};

template <class Word>
Tile<Word> carve(Arena& arena, int rows, int padded) {
  const size_t sizes[] = {
      (size_t)rows * padded / Word::kPerWord * 4, (size_t)rows * kTileKeys / Word::kPerWord * 4,
      (size_t)padded / Word::kPerWord * kTileKeys * 4, (size_t)kTileKeys / Word::kPerWord * padded * 4,
      (size_t)rows * kTileKeys * 4, (size_t)rows * padded * 4, (size_t)rows * 4, (size_t)rows * 4,
      (size_t)padded * 4};
  size_t total = 0;
  for (size_t size : sizes) total += (size + 63) / 64 * 64;
  arena.reserve(total);
  char* at = arena.data();
  void* parts[9];
  for (int i = 0; i < 9; ++i) {
    parts[i] = at;
    at += (sizes[i] + 63) / 64 * 64;
  }
  using T = typename Word::Type;
  std::memset(parts[8], 0, sizes[8]);
  return {(T*)parts[0],     (T*)parts[1],     (Vec*)parts[2],   (Vec*)parts[3], (float*)parts[4],
          (float*)parts[5], (float*)parts[6], (float*)parts[7], parts[8]};
}

// Rows of q into words, zeros up to the padded head.
template <class T>
void pack_query(const T* from, int head_dim, int padded, float* to) {
  for (int d = 0; d < head_dim; ++d) to[d] = to_float(from[d]);
  for (int d = head_dim; d < padded; ++d) to[d] = 0;
}

// 64 keys, one per lane: word w of all keys is row w of `to`.
template <class T>
void pack_keys(const void* const* rows, int head_dim, float* to) {
#if defined(__AVX512F__)
  if (sizeof(T) == 4) {
    for (int j = 0; j < kTileColumns; ++j)
      for (int d = 0; d < head_dim; d += 16)
        transpose_words(rows + j * kLanes, (size_t)d * 4, head_dim - d < 16 ? head_dim - d : 16,
                        (Vec*)to + d * kTileColumns + j, kTileColumns);
    return;
  }
#endif
  for (int j = 0; j < kTileKeys; ++j)
    for (int d = 0; d < head_dim; ++d) to[d * kTileKeys + j] = to_float(((const T*)rows[j])[d]);
}

template <class T>
void pack_values(const void* const* rows, int head_dim, int padded, float* to) {
  for (int j = 0; j < kTileKeys; ++j) {
    const T* row = (const T*)rows[j];
    int d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) store(to + j * padded + d, load(row + d));
    if (d < head_dim) store(to + j * padded + d, load_some(row + d, head_dim - d));
  }
}

inline void store_weights(float* to, int column, Vec weights) { store(to + column * kLanes, weights); }

#if defined(__AVX512BF16__)
template <class T>
void pack_query(const T* from, int head_dim, int padded, int32_t* to) {
  std::memcpy(to, from, (size_t)head_dim * 2);
  std::memset((char*)to + head_dim * 2, 0, (size_t)(padded - head_dim) * 2);
}

template <class T>
void pack_keys(const void* const* rows, int head_dim, int32_t* to) {
  const int words = head_dim / 2;
  for (int j = 0; j < kTileColumns; ++j)
    for (int w = 0; w < words; w += 16)
      transpose_words(rows + j * kLanes, (size_t)w * 4, words - w < 16 ? words - w : 16,
                      (Vec*)to + w * kTileColumns + j, kTileColumns);
}

template <class T>
void pack_values(const void* const* rows, int head_dim, int padded, int32_t* to) {
  alignas(64) static constexpr uint16_t kLow[32] = {
      0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int j = 0; j < kTileKeys; j += 2) {
    int32_t* at = to + (j / 2) * padded;
    for (int d = 0; d < padded; d += 32) {
      const int count = head_dim - d;
      const __mmask32 mask = count >= 32 ? 0xffffffffu : (__mmask32)((1ull << count) - 1);
      const __m512i even = _mm512_maskz_loadu_epi16(mask, (const Bf16*)rows[j] + d);
      const __m512i odd = _mm512_maskz_loadu_epi16(mask, (const Bf16*)rows[j + 1] + d);
      _mm512_store_si512(at + d, _mm512_permutex2var_epi16(even, low, odd));
      if (d + 16 < padded) _mm512_store_si512(at + d + 16, _mm512_permutex2var_epi16(even, high, odd));
    }
  }
}

inline void store_weights(int32_t* to, int column, Vec weights) {
  store((Bf16*)to + column * kLanes, weights);
}
#endif

// Scores of one query row over a tile become weights; `sums` and `totals` follow the new maximum.
// Key i of the tile is visible for i in [begin, end).
template <class Word>
void soften(Tile<Word>& tile, int row, int begin, int end, int padded, float scale) {
  constexpr int kPerRow = kTileKeys / Word::kPerWord;
  typename Word::Type* weights = tile.p + (size_t)row * kPerRow;
  if (begin >= end) {
    std::memset((void*)weights, 0, kPerRow * 4);
    return;
  }
  const float* scores = tile.scores + (size_t)row * kTileKeys;
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const bool whole = begin <= 0 && end >= kTileKeys;
  Vec s[kTileColumns];
  IntVec visible[kTileColumns];
  Vec top = splat(-INFINITY);
  for (int j = 0; j < kTileColumns; ++j) {
    s[j] = load(scores + j * kLanes) * scale;
    if (!whole) {
      const IntVec key = lane + j * kLanes;
      visible[j] = (key >= begin) & (key < end);
      s[j] = select(visible[j], s[j], splat(-INFINITY));
    }
    top = select((IntVec)(s[j] > top), s[j], top);
  }
  const float before = tile.highest[row];
  float highest = largest(top);
  highest = highest > before ? highest : before;
  Vec total{};
  for (int j = 0; j < kTileColumns; ++j) {
    Vec weight = exp_nonpositive(s[j] - highest);
    if (!whole) weight = select(visible[j], weight, Vec{});
    total += weight;
    store_weights(weights, j, weight);
  }
  if (highest != before) {
    const float shrink = before == -INFINITY ? 0.0f : std::exp(before - highest);
    float* sums = tile.sums + (size_t)row * padded;
    for (int d = 0; d < padded; d += kLanes) store(sums + d, load(sums + d) * shrink);
    tile.totals[row] *= shrink;
    tile.highest[row] = highest;
  }
  tile.totals[row] += sum(total);
}

template <class T>
struct KeyRows {
  const void* k[kTileKeys];
  const void* v[kTileKeys];

  // Where the keys from `first` lie; zeros from `end` on. Asks for the lines of what comes next.
  void find(const AttentionCall& call, const Unit& unit, int first, int end, const void* zeros) {
    const int64_t head = (int64_t)unit.kv_head * call.block_size * call.head_dim;
    for (int j = 0; j < kTileKeys; ++j) {
      const int key = first + j;
      if (key >= end) {
        k[j] = v[j] = zeros;
        continue;
      }
      const int64_t block = call.tables[unit.table + key / call.block_size];
      const T* at = (const T*)call.pool + block * call.block_stride + head +
                    (int64_t)(key % call.block_size) * call.head_dim;
      k[j] = at;
      v[j] = at + call.value_offset;
    }
  }

  void prefetch(int head_dim) const {
    const int bytes = head_dim * (int)sizeof(T);
    for (int j = 0; j < kTileKeys; ++j)
      for (int at = 0; at < bytes; at += 64) {
        __builtin_prefetch((const char*)k[j] + at);
        __builtin_prefetch((const char*)v[j] + at);
      }
  }
};

template <class T, class Word>
void attend_unit(const AttentionCall& call, const Unit& unit, Arena& arena) {
  const int head_dim = call.head_dim, padded = round_up(head_dim, kLanes);
  const int group = call.num_heads / call.num_kv_heads, rows = unit.num_queries * group;
  const int words = padded / Word::kPerWord;
  Tile<Word> tile = carve<Word>(arena, rows, padded);
  for (int row = 0; row < rows; ++row) {
    const T* from = (const T*)call.q + (unit.token + row / group) * call.q_stride +
                    (unit.kv_head * group + row % group) * head_dim;
    pack_query(from, head_dim, padded, tile.q + (size_t)row * words);
    tile.highest[row] = -INFINITY;
    tile.totals[row] = 0;
  }
  std::memset(tile.sums, 0, (size_t)rows * padded * 4);
  if (padded != head_dim) std::memset((void*)tile.keys, 0, (size_t)words * kTileKeys * 4);

  KeyRows<T> at, next;
  at.find(call, unit, unit.first_key, unit.end_key, tile.zeros);
  for (int first = unit.first_key; first < unit.end_key; first += kTileKeys) {
    next.find(call, unit, first + kTileKeys, unit.end_key, tile.zeros);
    next.prefetch(head_dim);
    pack_keys<T>(at.k, head_dim, (typename Word::Type*)tile.keys);
    pack_values<T>(at.v, head_dim, padded, (typename Word::Type*)tile.values);
    multiply<Word>(tile.q, words, tile.keys, kTileColumns, tile.scores, kTileKeys, rows, words,
                   false);
    for (int row = 0; row < rows; ++row) {
      const int query = unit.position + row / group;
      const int end = (query + 1 < unit.end_key ? query + 1 : unit.end_key) - first;
      const int begin = call.window > 0 ? query - call.window + 1 - first : 0;
      soften<Word>(tile, row, begin, end < kTileKeys ? end : kTileKeys, padded, call.scale);
    }
    multiply<Word>(tile.p, kTileKeys / Word::kPerWord, tile.values, padded / kLanes, tile.sums,
                   padded, rows, kTileKeys / Word::kPerWord, true);
    at = next;
  }
  for (int row = 0; row < rows; ++row) {
    const float* sums = tile.sums + (size_t)row * padded;
    if (unit.partial >= 0) {
      float* to = call.partials + (int64_t)unit.partial * kLanes + (int64_t)row * (padded + kLanes);
      to[0] = tile.highest[row];
      to[1] = tile.totals[row];
      std::memcpy(to + kLanes, sums, (size_t)padded * 4);
      continue;
    }
    T* to = (T*)call.out + ((int64_t)(unit.token + row / group) * call.num_heads +
                            unit.kv_head * group + row % group) * head_dim;
    const float share = 1.0f / tile.totals[row];
    int d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) store(to + d, load(sums + d) * share);
    if (d < head_dim) store_some(to + d, load(sums + d) * share, head_dim - d);
  }
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
      total += std::exp(from[s * split_size] - highest) * from[s * split_size + 1];
    T* to = (T*)call.out + ((int64_t)(merge.token + row / group) * call.num_heads +
                            merge.kv_head * group + row % group) * head_dim;
    for (int d = 0; d < head_dim; d += kLanes) {
      Vec sum{};
      for (int s = 0; s < merge.num_splits; ++s) {
        const float* split = from + s * split_size;
        sum += load(split + kLanes + d) * std::exp(split[0] - highest);
      }
      const int count = head_dim - d < kLanes ? head_dim - d : kLanes;
      if (count == kLanes) store(to + d, sum / total);
      else store_some(to + d, sum / total, count);
    }
  }
}

template <class T>
void write_token(const AttentionCall& call, int64_t token) {
  const int64_t block = call.slots[2 * token], offset = call.slots[2 * token + 1];
  const size_t bytes = (size_t)call.head_dim * sizeof(T);
  T* slot = (T*)call.pool + block * call.block_stride + offset * call.head_dim;
  for (int head = 0; head < call.num_kv_heads; ++head) {
    const int64_t from = token * call.kv_stride + (int64_t)head * call.head_dim;
    T* to = slot + (int64_t)head * call.block_size * call.head_dim;
    std::memcpy(to, (const T*)call.k + from, bytes);
    std::memcpy(to + call.value_offset, (const T*)call.v + from, bytes);
  }
}

template <class T, class Word>
void attend(const AttentionCall& call) {
  const Unit* units = (const Unit*)call.units;
  const Merge* merges = (const Merge*)call.merges;
#pragma omp parallel num_threads(call.num_threads)
  {
    static thread_local Arena arena;
#pragma omp for schedule(static)
    for (int64_t token = 0; token < call.num_tokens; ++token) write_token<T>(call, token);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < call.num_units; ++i) attend_unit<T, Word>(call, units[i], arena);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < call.num_merges; ++i) merge_splits<T>(call, merges[i]);
  }
}

}  // namespace baton
