// Where the keys and values of a tile lie in a pool of pairs, for attention of a few query rows of
// each KV head, as decode has them: they are read once, where they lie.
//
// For a tile of 64 keys, the scores of all heads are computed first, then all weights, then the
// sums of the values, so that each block is read in order; all the while, memory a little further
// on is prefetched.

#pragma once

#include "paired.h"
#include "softmax.h"
#include "tiles.h"

namespace baton {

#if defined(BATON_PAIRS)
constexpr int kFewHeads = 32;  // of a unit

// The distance from what is read to what is prefetched, in bytes.
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
      : call_(call), lines_((int)(group_bytes<P>(call.head_dim) / 64)) {
    Group<P> next_keys[kTileGroups];
    count_ = find(unit, first, false, at_, first_keys_);
    values_ = count_ * unit.num_kv_heads;
    find(unit, first, true, at_ + values_, first_values_);
    const void** next = at_ + 2 * values_;
    const int num_next = find(unit, first + kTileKeys, false, next, next_keys);
    all_ = 2 * values_ + num_next * unit.num_kv_heads;
    if constexpr (std::is_same_v<P, Split>) {
      for (int group = 0; group < count_; ++group)
        for (const Group<P>& each : {first_keys_[group], first_values_[group]})
          ask_for_wide(each.quads, unit.num_kv_heads);
      for (int group = 0; group < num_next; ++group) ask_for_spans(next_keys[group].quads);
    }
  }

  int count() const { return count_; }  // of one head
  const void* const* keys(int head) const { return at_ + head * count_; }
  const void* const* values(int head) const { return at_ + values_ + head * count_; }
  Group<P> key(int head, int group) const { return first_keys_[group].later(call_, head); }
  Group<P> value(int head, int group) const { return first_values_[group].later(call_, head); }

  // Prefetches as many lines as the groups of a head that begin at `at` have, from those that
  // follow.
  Ahead ahead(const void* const* at) const { return lines_after(at, 0, count_ * lines_); }

  // The same for the `count` groups that begin there: the first half of those lines, or the second.
  Ahead ahead(const void* const* at, int count, int half) const {
    const int lines = count * lines_, middle = lines / 2;
    return half == 0 ? lines_after(at, 0, middle) : lines_after(at, middle, lines);
  }

 private:
  const AttentionCall& call_;
  const void* at_[3 * kFewHeads * kTileGroups];  // keys of all heads, their values, the next keys
  Group<P> first_keys_[kTileGroups];             // of the first head
  Group<P> first_values_[kTileGroups];
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

  int find(const Unit& unit, int first, bool is_value, const void** to, Group<P>* of_first) {
    const int left = (unit.end_key - first + kGroupTokens - 1) / kGroupTokens;
    const int n = left < 0 ? 0 : left < kTileGroups ? left : kTileGroups;
    const size_t head_bytes =
        std::is_same_v<P, Split> ? group_bytes<P>(call_.head_dim) * (call_.block_size / kGroupTokens)
                                 : call_.head_stride * sizeof(P);
    for (int group = 0; group < n; ++group) {
      of_first[group] = group_at<P>(call_, unit.table, unit.kv_head, first + group * kGroupTokens,
                                    is_value);
      const char* from = (const char*)of_first[group].begin();
      for (int head = 0; head < unit.num_kv_heads; ++head, from += head_bytes)
        to[head * n + group] = from;
    }
    return n;
  }

  // Prefetches the rests of quads without a span.
  void ask_for_wide(Quads quads, int heads) const {
    constexpr uint64_t kNoSpan = 0x8080808080808080u;  // a bit that no span has
    for (int head = 0; head < heads; ++head, quads = later_head(call_, quads, 1))
      for (int q = 0; q < quads_of(call_.head_dim); q += 8) {
        uint64_t wide = load_as<uint64_t>(quads.spans + q) & kNoSpan;
        for (; wide != 0; wide &= wide - 1)
          __builtin_prefetch(quads.high + (q + __builtin_ctzll(wide) / 8) * kHighBytes);
      }
  }

  // Prefetches the spans of a whole block; `quads` are the first keys' of one of its heads.
  void ask_for_spans(const Quads& quads) const {
    const int64_t bytes = quads_of_block(call_);
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(quads.spans + at);
  }
};
#endif

}  // namespace baton
