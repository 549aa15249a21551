// Where the keys and values of a tile lie in a pool of pairs, for attention of a few query rows of each
// KV head, as decode has them: they are read once, where they lie.
//
// Of a tile of 64 keys the scores of all heads come first, then all weights, then what the values
// add. On the way the next tile is asked for, head by head, all groups of its keys and values by turns:
// they lie on pages of their own.

#pragma once

#include "paired.h"
#include "softmax.h"
#include "tiles.h"
#include "turns.h"

namespace baton {

#if defined(__AVX512BF16__)
constexpr int kFewHeads = 32;  // of a unit

// A tile's groups, as they lie.
template <class P>
class FewGroups {
 public:
  // The unit's tile of the keys from `first` on; `following` is what this thread attends to next, as far
  // as one can tell, or null.
  FewGroups(const AttentionCall& call, const Unit& unit, const Unit* following, int first)
      : call_(call), heads_(unit.num_kv_heads), lines_((int)(group_bytes<P>(call.head_dim) / 64)),
        now_(call, unit, first) {
    if constexpr (std::is_same_v<P, Split>) {
      for (int group = 0; group < now_.count; ++group)
        for (const Group<P>& each : {now_.keys[group], now_.values[group]})
          ask_for_wide(each.quads);
    }
    if (first + kTileKeys < unit.end_key)
      list_next(unit, first + kTileKeys);
    else if (following != nullptr && following->num_kv_heads <= kFewHeads)
      list_next(*following, PairedKeys<P>::first_of(following->first_key));
  }

  int heads() const { return heads_; }
  int count() const { return now_.count; }  // of one head
  Group<P> key(int head, int group) const { return now_.keys[group].later(call_, head); }
  Group<P> value(int head, int group) const { return now_.values[group].later(call_, head); }

  // One of `parts` parts of the next tile.
  RowTurns ahead(int part, int parts) const {
    const int64_t all = (int64_t)rows_ * lines_;
    return RowTurns(next_, turns_, (int)(all * part / parts), (int)(all * (part + 1) / parts),
                    lines_);
  }

 private:
  // A tile's groups of its first head.
  struct Found {
    Group<P> keys[kTileGroups];
    Group<P> values[kTileGroups];
    int count;

    Found(const AttentionCall& call, const Unit& unit, int first) {
      const int left = (unit.end_key - first + kGroupTokens - 1) / kGroupTokens;
      count = left < kTileGroups ? left : kTileGroups;
      for (int group = 0; group < count; ++group) {
        const int key = first + group * kGroupTokens;
        keys[group] = group_at<P>(call, unit.table, unit.kv_head, key, false);
        values[group] = group_at<P>(call, unit.table, unit.kv_head, key, true);
      }
    }
  };

  const AttentionCall& call_;
  int heads_;
  int lines_;  // of a group
  Found now_;
  const void* next_[2 * kFewHeads * kTileGroups];  // of each head the groups of keys, those of values
  int rows_ = 0;   // of these
  int turns_ = 0;  // of a head

  // What `ahead` asks for: the unit's tile of the keys from `first` on.
  void list_next(const Unit& unit, int first) {
    const Found found(call_, unit, first);
    turns_ = 2 * found.count;
    for (int head = 0; head < unit.num_kv_heads; ++head)
      for (const Group<P>* groups : {found.keys, found.values})
        for (int group = 0; group < found.count; ++group)
          next_[rows_++] = groups[group].later(call_, head).begin();
    if constexpr (std::is_same_v<P, Split>) {
      for (int group = 0; group < found.count; ++group) ask_for_spans(found.keys[group].quads);
    }
  }

  // The bits that lie elsewhere of quads without a span.
  void ask_for_wide(Quads quads) const {
    constexpr uint64_t kNoSpan = 0x8080808080808080u;  // a bit that no span has
    for (int head = 0; head < heads_; ++head, quads = later_head(call_, quads, 1))
      for (int q = 0; q < quads_of(call_.head_dim); q += 8) {
        uint64_t wide = load_as<uint64_t>(quads.spans + q) & kNoSpan;
        for (; wide != 0; wide &= wide - 1)
          __builtin_prefetch(quads.high + (q + __builtin_ctzll(wide) / 8) * kHighBytes);
      }
  }

  // The spans of a whole block, of which these are the first keys' of some head.
  void ask_for_spans(const Quads& quads) const {
    const int64_t bytes = quads_of_block(call_);
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(quads.spans + at);
  }
};
#endif

}  // namespace baton
