// What a call of attention is, its units of work, and the memory that a thread needs for one.

#pragma once

#include <cmath>

#include "arena.h"
#include "packing.h"

namespace baton {

// Mirrors `_Call` in cpu_attention.py. Strides count elements. T is what q, k, v and out are, P what
// the pool holds: the same, or e4m3, or bf16 by its bits (split.h).
struct AttentionCall {
  void* pool;               // of this layer, block 0; strides and offsets count its elements
  const void* q;            // [tokens, heads, head_dim], tokens q_stride apart
  const void* k;            // [tokens, kv_heads, head_dim], tokens kv_stride apart
  const void* v;
  void* out;                // [tokens, heads, head_dim]
  const int64_t* slots;     // [tokens, 2]: block, offset in it
  const int32_t* units;     // [num_units, 10], see Unit
  const int32_t* merges;    // [num_merges, 5], see Merge
  const int64_t* tables;    // blocks of all segments
  float* partials;          // of the units that are one of several splits
  uint8_t* spans;           // of this layer's quads, block 0: see split.h; else null
  int64_t layer_spans;      // between layers
  int64_t q_stride;
  int64_t kv_stride;
  int64_t block_stride;     // between blocks of the pool
  int64_t head_stride;      // between heads of a block, unless it is split
  int64_t value_offset;     // from a block's keys to its values
  int64_t num_tokens;
  int64_t num_units;
  int64_t num_merges;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t window;           // 0: none
  int32_t is_bf16;          // q, k, v and out; else fp32
  int32_t is_fp8;           // the pool; else as they are
  int32_t is_paired;        // the pool's order: see paired.h, with spans split.h; else by tokens
  int32_t num_threads;
  float scale;              // of scores, times log2(e): powers of 2 are cheaper
  float cap;                // of scaled scores, times log2(e); 0: none
  const float* sinks;       // [heads]: one more score of each query, without a value; or null
};

struct Unit {
  int32_t token;       // the first query's row in q
  int32_t num_queries;
  int32_t position;    // the first query's
  int32_t kv_head;     // the first
  int32_t num_kv_heads;
  int32_t first_key;   // of the range
  int32_t end_key;
  int32_t table;       // index into tables of block 0 of the segment, if the table had it
  int32_t partial;     // where in `partials`, in 16 floats, for the first head; -1: the only split
  int32_t partial_stride;  // from one head's to the next
};

struct Merge {
  int32_t token;
  int32_t num_queries;
  int32_t kv_head;
  int32_t num_splits;
  int32_t partial;     // of the first split, in 16 floats; the others follow
};

// Memory of one thread for one unit; nothing is read before it is written. It has the rows of all
// heads of the unit, one head after the other.
template <class Word>
struct Tile {
  typename Word::Type* q;  // [rows, words of a padded head]
  typename Word::Type* p;  // [rows, words of 64 keys]
  Vec* keys;               // [words of a head, 4]
  Vec* values;             // [words of 64 keys, vectors of a head]
  float* scores;           // [rows, 64]
  float* sums;             // [rows, padded head]
  float* highest;          // [rows], and room for a vector more
  Vec* totals;             // [rows], summed at the end
  void* zeros;             // one head
};

inline int round_up(int n, int step) { return (n + step - 1) / step * step; }

template <class Word>
Tile<Word> carve(Arena& arena, int rows, int padded) {
  const size_t sizes[] = {
      (size_t)rows * padded / Word::kPerWord * 4, (size_t)rows * kTileKeys / Word::kPerWord * 4,
      (size_t)padded / Word::kPerWord * kTileKeys * 4,
      (size_t)kTileKeys / Word::kPerWord * padded * 4,
      (size_t)rows * kTileKeys * 4, (size_t)rows * padded * 4, (size_t)(rows + kLanes) * 4,
      (size_t)rows * 64,
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
          (float*)parts[5], (float*)parts[6], (Vec*)parts[7],   parts[8]};
}

// What a head's sink adds to a total whose weights are relative to `highest`.
inline float sink_weight(const AttentionCall& call, int head, float highest) {
  return call.sinks == nullptr ? 0.0f : std::exp2(call.sinks[head] * 1.44269504f - highest);
}

template <class T>
T* row_of(T* tokens, const AttentionCall& call, int64_t stride, const Unit& unit, int head,
          int row) {
  const int group = call.num_heads / call.num_kv_heads;
  return tokens + (unit.token + row / group) * stride +
         ((unit.kv_head + head) * group + row % group) * call.head_dim;
}

}  // namespace baton
