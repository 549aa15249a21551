// Where the keys and values of a tile lie in a pool of pairs, for attention of a few query rows of each
// KV head, as decode has them: they are read once, where they lie.
//
// Of a tile of 64 keys the scores of all heads come first, then all weights, then what the values
// add: in each block that is one stretch of memory after the other, and what lies a little further on
// is asked for all the way.

#pragma once

#include "paired.h"
#include "softmax.h"
#include "tiles.h"

namespace baton {

#if defined(__AVX512BF16__)
constexpr int kFewHeads = 32;  // of a unit

// Bytes from what is read to what is asked for.
#if defined(__AMX_BF16__)
constexpr int kFewAhead = 6144;
#else
constexpr int kFewAhead = 12288;
#endif

// Where the groups of the tile of keys from `first` on lie.
template <class P>
class FewGroups {
 public:
  FewGroups(const AttentionCall& call, const Unit& unit, int first)
      : lines_((int)(group_bytes<P>(call.head_dim) / 64)) {
    count_ = find(call, unit, first, 0, at_);
    values_ = count_ * unit.num_kv_heads;
    find(call, unit, first, call.value_offset, at_ + values_);
    const void** next = at_ + 2 * values_;
    all_ = 2 * values_ + find(call, unit, first + kTileKeys, 0, next) * unit.num_kv_heads;
  }

  int count() const { return count_; }  // of one head
  const void* const* keys(int head) const { return at_ + head * count_; }
  const void* const* values(int head) const { return at_ + values_ + head * count_; }

  // As many lines as the groups of a head have that begin at `at`, of those that follow.
  Ahead ahead(const void* const* at) const { return lines_after(at, 0, count_ * lines_); }

  // The same of the `count` groups that begin there: the first half of those lines, or the second.
  Ahead ahead(const void* const* at, int count, int half) const {
    const int lines = count * lines_, middle = lines / 2;
    return half == 0 ? lines_after(at, 0, middle) : lines_after(at, middle, lines);
  }

 private:
  const void* at_[3 * kFewHeads * kTileGroups];  // keys of all heads, their values, the next keys
  int count_;
  int lines_;   // of a group
  int values_;  // where they begin in `at_`
  int all_;

  // Lines `begin` to `end`, counted from some way after `at`.
  Ahead lines_after(const void* const* at, int begin, int end) const {
    const int from = (int)(at - at_) * lines_ + kFewAhead / 64, all = all_ * lines_;
    return from + begin < all
               ? Ahead(at_, from + begin, from + end < all ? from + end : all, lines_)
               : Ahead();
  }

  int find(const AttentionCall& call, const Unit& unit, int first, int64_t part, const void** to) {
    const int left = (unit.end_key - first + kGroupTokens - 1) / kGroupTokens;
    const int n = left < 0 ? 0 : left < kTileGroups ? left : kTileGroups;
    for (int group = 0; group < n; ++group) {
      const P* from = group_at<P>(call, unit.table, unit.kv_head, first + group * kGroupTokens, part);
      for (int head = 0; head < unit.num_kv_heads; ++head, from += call.block_size * call.head_dim)
        to[head * n + group] = from;
    }
    return n;
  }
};
#endif

}  // namespace baton
