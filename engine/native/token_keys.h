// Keys and values in a pool of tokens in order.

#pragma once

#include "attention_call.h"

namespace baton {

// Where a head's keys of one tile lie in a pool of tokens in order, and how they become a tile of the
// products.
template <class P>
class TokenKeys {
 public:
  static constexpr int kRows = kTileKeys;  // pieces of memory
  const void* k[kRows];
  const void* v[kRows];

  static int first_of(int first_key) { return first_key; }
  static int lines_of(int head_dim) { return (head_dim * (int)sizeof(P) + 63) / 64; }

  // Packs the keys from `first` on, with zeros from the unit's end on.
  void find(const AttentionCall& call, const Unit& unit, int head, int first, const void* zeros) {
    const int end = unit.end_key;
    const P* pool = (const P*)call.pool + (unit.kv_head + head) * call.head_stride;
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

  template <class T>
  void pack_keys(Ahead ahead, int head_dim, T* to) const {
    baton::pack_keys<P>(k, ahead, head_dim, to);
  }
  template <class T>
  void pack_values(Ahead ahead, int head_dim, int padded, T* to) const {
    baton::pack_values<P>(v, ahead, head_dim, padded, to);
  }
};

}  // namespace baton
