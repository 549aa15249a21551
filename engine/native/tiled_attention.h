// Attention by tiles: groups of a pool of pairs are right sides without a copy, sixteen query rows
// of a KV head are a left side.
//
// A sum grows by products of 16 words (for values these are two groups), and a score's last product
// has eight words if a head has such a rest. So a row's result is the same whatever rows it shares
// a tile with.

#pragma once

#include "few_groups.h"
#include "token_keys.h"

#if defined(__AMX_BF16__)

namespace baton {

constexpr int kRowsInTurn = 64;

// Where the right sides of a tile of keys lie, by groups of sixteen tokens.
struct RightKeys {
  const char* at[kTileGroups];  // [words of a head, 16]
  int word_bytes;               // from one word to the next
};

// The right side of a group: the group as it lies, or converted into `to` if the pool holds other
// numbers.
template <class P>
const char* as_bf16(const Group<P>& group, int head_dim, char* to) {
  if constexpr (std::is_same_v<P, Bf16>) return (const char*)group.at;
  for_words(group, head_dim / 2, [&](int w, Vec vector) BATON_INLINE { *(Vec*)(to + w * 64) = vector; });
  return to;
}

// The right sides of `count` groups, group(g).
template <class GroupOf>
RightKeys right_keys(const GroupOf& group, int count, int head_dim, Tile<PairWord>& tile) {
  RightKeys keys;
  keys.word_bytes = 64;
  for (int g = 0; g < count; ++g)
    keys.at[g] =
        as_bf16(group(g), head_dim, (char*)tile.keys + group_bytes<Bf16>(head_dim) * g);
  return keys;
}

// Copies the values of `count` groups, group(g), [pairs of tokens, words of a head], with zeros for
// those of tokens outside [begin, end), counted from the tile's first, and up to an even count.
template <class GroupOf>
void copy_values(const GroupOf& group, int count, int head_dim, int begin, int end, Vec* to,
                 Ahead ahead) {
  const int vectors = kGroupTokens / 2 * head_dim / kLanes;  // of a group
  const unsigned asked = ahead.in_steps(count * kGroupTokens / 2);
  for (int g = 0; g < count; ++g, to += vectors)
    copy_seen(group(g), head_dim, begin - g * kGroupTokens, end - g * kGroupTokens, to, ahead, asked);
  if (count % 2 != 0) std::memset((void*)to, 0, (size_t)vectors * 64);
}

template <class P>
RightKeys right_keys(const PairedKeys<P>& at, int head_dim, Tile<PairWord>& tile) {
  return right_keys([&](int g) { return at.keys[g]; }, at.num_groups(), head_dim, tile);
}

template <class P>
void copy_values(const PairedKeys<P>& at, int head_dim, Tile<PairWord>& tile) {
  copy_values([&](int g) { return at.values[g]; }, at.num_groups(), head_dim, at.begin(), at.end(),
              tile.values, Ahead());
}

template <class P>
RightKeys right_keys(const TokenKeys<P>& at, int head_dim, Tile<PairWord>& tile) {
  at.pack_keys(Ahead(), head_dim, (int32_t*)tile.keys);
  RightKeys keys;
  keys.word_bytes = kTileColumns * 64;
  for (int g = 0; g < kTileGroups; ++g) keys.at[g] = (const char*)(tile.keys + g);
  return keys;
}

template <class P>
void copy_values(const TokenKeys<P>& at, int head_dim, Tile<PairWord>& tile) {
  at.pack_values(Ahead(), head_dim, round_up(head_dim, kLanes), (int32_t*)tile.values);
}

// Products of a tile of rows with `count` groups of keys, and with their values.
inline int score_products(int words, int count) {
  return (words + kTileWords - 1) / kTileWords * count;
}
inline int weigh_products(int padded, int count) { return (count + 1) / 2 * padded / kLanes; }

// Scores of the rows that `tiles` are shaped for, of `words` words each, with `count` groups of keys.
inline void score_tile(const int32_t* q, int words, const RightKeys& keys, int count, float* scores,
                       Ahead& ahead, unsigned asked) {
  for_sums(count, [](auto i) BATON_INLINE { tile_zero<i>(); });
  int w = 0;
  for (; w + kTileWords <= words; w += kTileWords) {
    tile_load<4>(q + w, words * 4);
    for_sums(count, [&](auto i) BATON_INLINE {
      ahead.ask(asked);
      tile_load<6>(keys.at[i] + w * keys.word_bytes, keys.word_bytes);
      tile_multiply<i, 4, 6>();
    });
  }
  if (w < words) {
    tile_load<5>(q + w, words * 4);
    for_sums(count, [&](auto i) BATON_INLINE {
      ahead.ask(asked);
      tile_load<7>(keys.at[i] + w * keys.word_bytes, keys.word_bytes);
      tile_multiply<i, 5, 7>();
    });
  }
  for_sums(count, [&](auto i) BATON_INLINE {
    tile_store<i>(scores + i * kLanes, kTileKeys * 4);
  });
}

// Adds the weighted values of the first `count` groups to the sums of those rows.
inline void weigh_tile(const int32_t* weights, const Vec* values, int count, int padded, float* sums,
                       Ahead& ahead, unsigned asked) {
  const int vectors = padded / kLanes;
  for (int v = 0; v < vectors; v += 4, sums += 4 * kLanes) {
    const int columns = vectors - v < 4 ? vectors - v : 4;
    for_sums(columns, [&](auto i) BATON_INLINE { tile_load<i>(sums + i * kLanes, padded * 4); });
    for (int pair = 0; pair < count * kGroupTokens / 2; pair += kTileWords) {
      tile_load<4>(weights + pair, kTileKeys * 2);
      for_sums(columns, [&](auto i) BATON_INLINE {
        ahead.ask(asked);
        tile_load<6>(values + (size_t)pair * vectors + v + i, padded * 4);
        tile_multiply<i, 4, 6>();
      });
    }
    for_sums(columns, [&](auto i) BATON_INLINE { tile_store<i>(sums + i * kLanes, padded * 4); });
  }
}

// Adds one more tile of keys to the results of the unit's rows of one head; `later`, the keys of
// the next tile, are prefetched. Some rows are handled at a time, so that their scores and weights
// stay in the first cache; none is read right after it was written, because that would wait.
template <class Keys>
void attend_tile(const AttentionCall& call, const Unit& unit, Tile<PairWord>& tile, Tiles& tiles,
                 const Keys& at, const Keys& later, int head, int first) {
  const int head_dim = call.head_dim, padded = round_up(head_dim, kLanes), words = padded / 2;
  const int group = call.num_heads / call.num_kv_heads, rows = unit.num_queries * group;
  const View view{unit.position,  group,        rows, first,
                  unit.first_key, unit.end_key, call.window};
  const RightKeys keys = right_keys(at, head_dim, tile);
  copy_values(at, head_dim, tile);
  const int row0 = head * rows, steps = (rows + kTileRows - 1) / kTileRows;
  const int per_row = Keys::lines_of(head_dim), lines = per_row * Keys::kRows;
  Ahead next_keys(later.k, 0, lines, per_row), next_values(later.v, 0, lines, per_row);
  const unsigned asked_keys = next_keys.in_steps(steps * score_products(words, kTileGroups));
  const unsigned asked_values = next_values.in_steps(steps * weigh_products(padded, kTileGroups));
  const auto shape = [&](int row) {
    tiles.shape(TileShapes::of_one(rows - row < kTileRows ? rows - row : kTileRows));
  };
  const auto groups_of = [&](int row) {  // that are seen
    const int last = (row + kTileRows < rows ? row + kTileRows : rows) - 1, end = view.of(last).end;
    return end > 0 ? (end + kGroupTokens - 1) / kGroupTokens : 0;
  };
  const auto score = [&](int row) {
    shape(row);
    score_tile(tile.q + (size_t)(row0 + row) * words, words, keys, groups_of(row),
               tile.scores + (size_t)(row0 + row) * kTileKeys, next_keys, asked_keys);
  };
  const auto weigh = [&](int row) {
    shape(row);
    weigh_tile(tile.p + (size_t)(row0 + row) * kTileKeys / 2, tile.values, groups_of(row), padded,
               tile.sums + (size_t)(row0 + row) * padded, next_values, asked_values);
  };
  for (int begin = 0; begin < rows; begin += kRowsInTurn) {
    const int end = begin + kRowsInTurn < rows ? begin + kRowsInTurn : rows;
    const auto for_tiles = [&](const auto& multiply) {
      for (int row = begin; row < end; row += kTileRows)
        if (groups_of(row) > 0) multiply(row);
    };
    for_tiles(score);
    soften(tile, row0, begin, end, view, padded, call);
    for_tiles(weigh);
  }
}

// Attends to all keys of a unit that has at most sixteen rows of a head, which is bound by memory;
// returns false for other units.
template <class P>
bool attend_by_tiles(const AttentionCall& call, const Unit& unit, Tile<PairWord>& tile,
                     Tiles& tiles) {
  const int group = call.num_heads / call.num_kv_heads, rows = unit.num_queries * group;
  if (!call.is_paired || rows > kTileRows || unit.num_kv_heads > kFewHeads) return false;
  const int head_dim = call.head_dim, words = head_dim / 2, heads = unit.num_kv_heads;
  tiles.shape(TileShapes::of_one(rows));
  for (int first = PairedKeys<P>::first_of(unit.first_key); first < unit.end_key;
       first += kTileKeys) {
    const FewGroups<P> groups(call, unit, first);
    const int begin = unit.first_key - first, end = unit.end_key - first, count = groups.count();
    for (int head = 0; head < heads; ++head) {
      Ahead ahead = groups.ahead(groups.keys(head));
      const int row0 = head * rows;
      score_tile(tile.q + (size_t)row0 * words, words,
                 right_keys([&](int g) { return groups.key(head, g); }, count, head_dim, tile), count,
                 tile.scores + (size_t)row0 * kTileKeys, ahead,
                 ahead.in_steps(score_products(words, count)));
    }
    // Two groups at a time, copied one turn before they are multiplied, because reading a tile
    // right after writing it waits.
    const int pairs = (count + 1) / 2, turns = heads * pairs;
    const size_t pair_vectors = (size_t)kGroupTokens * head_dim / kLanes;
    const auto slot = [&](int turn) { return tile.values + turn % 2 * pair_vectors; };
    const auto values_of = [&](int turn) { return groups.values(turn / pairs) + turn % pairs * 2; };
    const auto count_of = [&](int turn) {
      return turn % pairs * 2 + 1 < count ? 2 : 1;
    };
    const auto copy = [&](int turn) {
      const int seen = turn % pairs * 2 * kGroupTokens, n = count_of(turn);
      const auto group = [&](int g) { return groups.value(turn / pairs, turn % pairs * 2 + g); };
      copy_values(group, n, head_dim, begin - seen, end - seen, slot(turn),
                  groups.ahead(values_of(turn), n, 0));
    };
    copy(0);
    const View view{unit.position, group, rows, first, unit.first_key, unit.end_key, call.window};
    soften(tile, 0, 0, heads * rows, view, head_dim, call);
    for (int turn = 0; turn < turns; ++turn) {
      if (turn + 1 < turns) copy(turn + 1);
      const int row0 = turn / pairs * rows;
      Ahead ahead = groups.ahead(values_of(turn), count_of(turn), 1);
      weigh_tile(tile.p + (size_t)row0 * kTileKeys / 2 + turn % pairs * kTileWords, slot(turn), 2,
                 head_dim, tile.sums + (size_t)row0 * head_dim, ahead,
                 ahead.in_steps(weigh_products(head_dim, 2)));
    }
  }
  return true;
}

}  // namespace baton

#endif
