// Divides a batch's attention into units of work (see attention.h): one for each tile of queries of
// a segment and group of KV heads; where queries are few, one for each piece of a long context,
// too.
//
// Pieces end at multiples of a fixed length: neither the batch nor the number of threads changes
// what is summed with what.

#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"

namespace baton {

constexpr int kUnitsPerThread = 4;  // costs differ: few large ones leave threads waiting for the last

// Mirrors `_PlanCall` in cpu_attention.py.
struct PlanCall {
  const int64_t* query_lens;    // [num_segments]
  const int64_t* wanted;        // [num_segments]: how many of its last queries attend
  const int64_t* contexts;      // [num_segments], the queries included
  const int64_t* tables;        // blocks of all segments, one after the other
  const int64_t* firsts;        // [num_segments]: leading blocks that a table leaves out
  int64_t* slots;               // [tokens, 2], or null
  int32_t* units;               // [max_units, 10]
  int32_t* merges;              // [max_merges, 5]
  int64_t num_segments;
  int64_t max_units;
  int64_t max_merges;
  int64_t num_units;            // from here on to 64 bits: the results
  int64_t num_merges;           // more than fit: nothing was written, plan again
  int64_t num_partials;         // floats
  int32_t block_size;
  int32_t group;                // query heads of a KV head
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t window;               // 0: none
  int32_t tile_rows;            // query rows of a unit, at most
  int32_t split_rows;           // units of more rows are not split
  int32_t split_keys;
  int32_t num_threads;
};

struct QueryTile {
  int64_t token, table;
  int queries, position, first_key, end_key, rows, splits;
};

inline int64_t table_blocks(const PlanCall& call, int64_t segment) {
  return (call.contexts[segment] + call.block_size - 1) / call.block_size - call.firsts[segment];
}

// Query rows of a unit: the most, or half of that if there would be too few units for the threads.
inline int unit_rows(const PlanCall& call) {
  int64_t units = 0;
  for (int64_t s = 0; s < call.num_segments; ++s)
    units += (call.wanted[s] * call.group + call.tile_rows - 1) / call.tile_rows;
  const bool enough = units * call.num_kv_heads >= (int64_t)kUnitsPerThread * call.num_threads;
  return enough ? call.tile_rows : call.tile_rows / 2;
}

inline QueryTile tile_at(const PlanCall& call, int most, int64_t segment, int64_t offset,
                         int64_t token, int64_t table) {
  QueryTile tile;
  tile.token = token + offset;
  tile.table = table;
  tile.queries = (int)std::min<int64_t>(call.wanted[segment] - offset, most);
  tile.position = (int)(call.contexts[segment] - call.wanted[segment] + offset);
  tile.first_key = call.window > 0 ? std::max(0, tile.position - call.window + 1) : 0;
  tile.end_key = tile.position + tile.queries;
  tile.rows = tile.queries * call.group;
  const int pieces = (tile.end_key - 1) / call.split_keys - tile.first_key / call.split_keys + 1;
  tile.splits = tile.rows > call.split_rows ? 1 : pieces;
  return tile;
}

inline std::vector<QueryTile> tiles_of(const PlanCall& call) {
  std::vector<QueryTile> tiles;
  const int most = std::max(1, unit_rows(call) / call.group);  // queries
  int64_t token = 0, table = 0;
  for (int64_t s = 0; s < call.num_segments; ++s) {
    for (int64_t offset = 0; offset < call.wanted[s]; offset += most)
      tiles.push_back(tile_at(call, most, s, offset, token, table - call.firsts[s]));
    token += call.wanted[s];
    table += table_blocks(call, s);
  }
  return tiles;
}

// KV heads of a unit: as many as leave work for every thread; one if it has many rows.
inline int heads_together(const PlanCall& call, const std::vector<QueryTile>& tiles) {
  int64_t splits = 0;
  int rows = 0;
  for (const QueryTile& tile : tiles) {
    splits += tile.splits;
    rows = std::max(rows, tile.rows);
  }
  if (rows * call.num_kv_heads > call.tile_rows) return 1;
  for (int n = call.num_kv_heads; n > 1; --n)
    if (call.num_kv_heads % n == 0 && splits * (call.num_kv_heads / n) >= call.num_threads)
      return n;
  return 1;
}

inline void add_units(const PlanCall& call, const QueryTile& tile, int together, int64_t partial,
                      int64_t stride, Unit*& to) {
  for (int head = 0; head < call.num_kv_heads; head += together)
    for (int split = 0; split < tile.splits; ++split, ++to) {
      const int piece = tile.first_key / call.split_keys + split;
      const bool whole = tile.splits == 1;
      *to = {(int32_t)tile.token,
             tile.queries,
             tile.position,
             head,
             together,
             whole ? tile.first_key : std::max(piece * call.split_keys, tile.first_key),
             whole ? tile.end_key : std::min((piece + 1) * call.split_keys, tile.end_key),
             (int32_t)tile.table,
             whole ? -1 : (int32_t)(partial + head * stride + split * (stride / tile.splits)),
             (int32_t)stride};
    }
}

inline int64_t unit_cost(const PlanCall& call, const Unit& unit) {
  return (int64_t)unit.num_queries * call.group * (unit.end_key - unit.first_key);
}

// Writes where each token's keys and values go, also for the queries that do not attend.
inline void find_slots(const PlanCall& call) {
  int64_t* slot = call.slots;
  const int64_t* table = call.tables;
  for (int64_t s = 0; s < call.num_segments; ++s) {
    for (int64_t at = call.contexts[s] - call.query_lens[s]; at < call.contexts[s]; ++at) {
      *slot++ = table[at / call.block_size - call.firsts[s]];
      *slot++ = at % call.block_size;
    }
    table += table_blocks(call, s);
  }
}

inline void plan_attention(PlanCall& call) {
  const std::vector<QueryTile> tiles = tiles_of(call);
  const int together = heads_together(call, tiles);
  const int64_t row_vectors = (call.head_dim + kLanes - 1) / kLanes + 1;
  call.num_units = call.num_merges = 0;
  for (const QueryTile& tile : tiles) {
    call.num_units += tile.splits * (call.num_kv_heads / together);
    call.num_merges += tile.splits == 1 ? 0 : call.num_kv_heads;
  }
  if (call.num_units > call.max_units || call.num_merges > call.max_merges) return;
  Unit* unit = (Unit*)call.units;
  Merge* merge = (Merge*)call.merges;
  int64_t partial = 0;  // in vectors: by tile, head and split
  for (const QueryTile& tile : tiles) {
    const int64_t stride = tile.splits == 1 ? 0 : tile.rows * row_vectors * tile.splits;
    add_units(call, tile, together, partial, stride, unit);
    for (int head = 0; stride > 0 && head < call.num_kv_heads; ++head)
      *merge++ = {(int32_t)tile.token, tile.queries, head, tile.splits,
                  (int32_t)(partial + head * stride)};
    partial += stride * call.num_kv_heads;
  }
  call.num_partials = partial * kLanes;
  std::stable_sort((Unit*)call.units, unit, [&](const Unit& a, const Unit& b) {
    return unit_cost(call, a) > unit_cost(call, b);  // the costly first
  });
  if (call.slots != nullptr) find_slots(call);
}

}  // namespace baton
