// Keys and values in the order in which bf16 dot products take them, so that nothing is rearranged
// on the way from memory: where a head's block has whole groups of sixteen tokens, a group is
// [head_dim / 2, 16 tokens, 2] of its keys and [8 pairs of tokens, head_dim, 2] of its values. Groups,
// heads and layers lie where they lie in a pool of tokens in order.

#pragma once

#include <type_traits>

#include "split.h"

#if defined(BATON_PAIRS)

namespace baton {

constexpr int kGroupTokens = kLanes;
constexpr int kTileGroups = kTileKeys / kGroupTokens;

// The bytes of a group that attention reads in one piece; the groups of a head's block follow each
// other.
template <class P>
inline size_t group_bytes(int head_dim) {
  return (size_t)kGroupTokens * head_dim * sizeof(P);
}
template <>
inline size_t group_bytes<Split>(int head_dim) {
  return (size_t)quads_of(head_dim) * kLowBytes;
}

// 16 words, as pairs of bf16: exact.
inline Vec read_words(const Bf16* at) { return load_as<Vec>(at); }
inline Vec read_words(const Fp8* at) { return (Vec)load_pairs(0xffffffffu, at); }

// A group of one head's keys or values in a pool of pairs.
template <class P>
struct Group {
  const P* at;

  static Group none(const void* zeros) { return {(const P*)zeros}; }
  const void* begin() const { return at; }

  // The same group of the head that comes `heads` later.
  Group later(const AttentionCall& call, int heads) const {
    return {at + heads * call.head_stride};
  }
};

template <>
struct Group<Split> {
  Quads quads;

  static Group none(const void* zeros) { return {{(char*)zeros, nullptr, nullptr}}; }
  const void* begin() const { return quads.low; }
  Group later(const AttentionCall& call, int heads) const {
    return {later_head(call, quads, heads)};
  }
};

// The group of the token `key` of a segment, for one head.
template <class P>
inline Group<P> group_at(const AttentionCall& call, int64_t table, int head, int key,
                         bool is_value) {
  const int64_t block = call.tables[table + key / call.block_size];
  const int offset = key % call.block_size;
  if constexpr (std::is_same_v<P, Split>) {
    return {quads_at(call, block, is_value, head, offset)};
  } else {
    return {(const P*)call.pool + block * call.block_stride + is_value * call.value_offset +
            head * call.head_stride + offset / kGroupTokens * kGroupTokens * call.head_dim};
  }
}

// The values of a group, with zeros for the tokens outside [begin, end), counted from the group's
// first.
template <class P>
inline void copy_values(const Group<P>& group, int head_dim, int begin, int end, P* to) {
  const P* from = group.at;
  const auto sees = [&](int token) { return begin <= token && token < end; };
  for (int token = 0; token < kGroupTokens; token += 2)
    for (int d = 0; d < head_dim; ++d, from += 2, to += 2) {
      to[0] = sees(token) ? from[0] : P{};
      to[1] = sees(token + 1) ? from[1] : P{};
    }
}

// The same as the right side of a product.
template <class P>
inline void copy_seen(const Group<P>& group, int head_dim, int begin, int end, Vec* to, Ahead& ahead,
                      unsigned asked) {
  const auto sees = [&](int token) { return begin <= token && token < end; };
  const int of_pair = head_dim / kPairDims;  // quads, where there are any
  const int vectors = head_dim / kLanes;
  for (int token = 0; token < kGroupTokens; token += 2) {
    ahead.ask(asked);
    const __mmask32 mask = (sees(token) ? 0x55555555u : 0) | (sees(token + 1) ? 0xaaaaaaaau : 0);
    if constexpr (std::is_same_v<P, Split>) {
      for (int q = token / 2 * of_pair; q < (token / 2 + 1) * of_pair; ++q) {
        const Quad quad = group.quads.read(q);
        for (const Vec& vector : quad.vectors)
          store_parts((Vec)keep(mask, (Bits)vector), to++, vectors);
      }
    } else {
      const P* from = group.at + token * head_dim;
      for (int d = 0; d < head_dim; d += kLanes, from += 2 * kLanes)
        store_parts((Vec)load_pairs(mask, from), to++, vectors);
    }
    to += (PairWord::kPasses - 1) * vectors;
  }
}

// Values of a group as the products of few rows take them: a copy in which values that are not seen
// are zeros.
template <class P>
struct SeenValues {
  const P* at;

  // The words of a pair of tokens from dimension `begin` + 16 kFirst on, vector by vector.
  template <int kFirst>
  BATON_INLINE auto words(int head_dim, int pair, int begin) const {
    const P* from = at + (pair * head_dim + begin + kFirst * kLanes) * 2;
    return [from](int c) BATON_INLINE { return read_words(from + c * kLanes * 2); };
  }
};

// The same of quads, without a copy: only tokens in [begin, end) are seen.
template <>
struct SeenValues<Split> {
  Quads quads;
  int begin;
  int end;

  template <int kFirst>
  BATON_INLINE auto words(int head_dim, int pair, int first) const {
    Quad quad = quads.read((pair * head_dim + first) / kPairDims);
    if (2 * pair < begin || 2 * pair + 2 > end) {
      const auto sees = [&](int token) { return begin <= token && token < end; };
      const __mmask32 mask =
          (sees(2 * pair) ? 0x55555555u : 0) | (sees(2 * pair + 1) ? 0xaaaaaaaau : 0);
      for (Vec& vector : quad.vectors) vector = (Vec)keep(mask, (Bits)vector);
    }
    return [quad](int c) BATON_INLINE { return quad.vectors[kFirst + c]; };
  }
};

// Calls action(w, vector) with the words of a group of keys.
template <class P, class Action>
inline void for_words(const Group<P>& group, int words, const Action& action) {
  if constexpr (std::is_same_v<P, Split>) {
    for (int w = 0; w < words; w += kQuadVectors) {
      const Quad quad = group.quads.read(w / kQuadVectors);
      for (int i = 0; i < kQuadVectors; ++i) action(w + i, quad.vectors[i]);
    }
  } else {
    for (int w = 0; w < words; ++w) action(w, read_words(group.at + w * 2 * kGroupTokens));
  }
}

// Writes one number of each of sixteen pairs, to every other place from `to` on.
inline void store_every_other(const Bf16* from, Bf16* to) {
#if defined(BATON_HALVES)
  for (int i = 0; i < kLanes; ++i) to[2 * i] = from[i];
#else
  const Bits wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  _mm512_mask_storeu_epi16(to, 0x55555555u, wide);
#endif
}

inline void store_every_other(const Fp8* from, Fp8* to) {
  for (int i = 0; i < kLanes; ++i) to[2 * i] = from[i];
}

// Writes a token's keys and values of one head to their place in its group.
template <class P>
inline void write_paired(const Bf16* k, const Bf16* v, int head_dim, int token, P* keys, P* values) {
  values += token / 2 * head_dim * 2 + token % 2;
  for (int d = 0; d < head_dim; d += kLanes) {
    P key[kLanes], value[kLanes];
    copy_head(k + d, kLanes, key);
    copy_head(v + d, kLanes, value);
    for (int i = 0; i < kLanes; i += 2)
      std::memcpy(keys + ((d + i) / 2 * kGroupTokens + token) * 2, key + i, 2 * sizeof(P));
    store_every_other(value, values + 2 * d);
  }
}

// Writes whole groups of bf16, from sixteen tokens `stride` numbers apart.
inline void write_group(const Bf16* k, const Bf16* v, int64_t stride, int head_dim, Bf16* keys,
                        Bf16* values) {
  const void* rows[kGroupTokens];
  for (int i = 0; i < kGroupTokens; ++i) rows[i] = k + i * stride;
  for (int w = 0; w < head_dim / 2; w += kLanes)
    pack_sixteen<Bf16>(rows, w, head_dim / 2, (Vec*)keys + w, 1);
  for (int i = 0; i < kGroupTokens; i += 2, values += 2 * head_dim)
    pack_pair(v + i * stride, v + (i + 1) * stride, head_dim, head_dim, (int32_t*)values);
}

// Where a head's keys of one tile lie in a pool of pairs, and how they become a tile of the products.
template <class P>
class PairedKeys {
 public:
  static constexpr int kRows = kTileGroups;  // pieces of memory
  const void* k[kRows];
  const void* v[kRows];
  Group<P> keys[kRows];
  Group<P> values[kRows];

  static int first_of(int first_key) { return first_key / kGroupTokens * kGroupTokens; }
  static int lines_of(int head_dim) { return (int)(group_bytes<P>(head_dim) / 64); }

  void find(const AttentionCall& call, const Unit& unit, int head, int first, const void* zeros) {
    begin_ = unit.first_key - first;
    end_ = unit.end_key - first;
    for (int group = 0; group < kTileGroups; ++group) {
      const int key = first + group * kGroupTokens;
      const bool is_there = key < unit.end_key;
      const auto group_of = [&](bool is_value) {
        return is_there ? group_at<P>(call, unit.table, unit.kv_head + head, key, is_value)
                        : Group<P>::none(zeros);
      };
      keys[group] = group_of(false);
      values[group] = group_of(true);
      k[group] = keys[group].begin();
      v[group] = values[group].begin();
    }
  }

  void pack_keys(Ahead ahead, int head_dim, PairType* packed) const {
    Vec* to = (Vec*)packed;
    const int words = head_dim / 2;
    const unsigned asked = ahead.in_steps(kTileGroups * words);
    for (int group = 0; group < kTileGroups && group * kGroupTokens < end_; ++group)
      for_words(keys[group], words, [&](int w, Vec vector) BATON_INLINE {
        ahead.ask(asked);
        store_parts(vector, to + w * PairWord::kPasses * kTileColumns + group, kTileColumns);
      });
  }

  void pack_values(Ahead ahead, int head_dim, int, PairType* packed) const {
    Vec* to = (Vec*)packed;
    const unsigned asked = ahead.in_steps(kTileGroups * kGroupTokens / 2);
    for (int group = 0; group < kTileGroups && group * kGroupTokens < end_; ++group) {
      copy_seen(values[group], head_dim, begin_ - group * kGroupTokens,
                end_ - group * kGroupTokens, to, ahead, asked);
      to += kGroupTokens / 2 * PairWord::kPasses * (head_dim / kLanes);
    }
  }

  // Of the tile's keys, the unit's.
  int begin() const { return begin_; }
  int end() const { return end_; }
  int num_groups() const {
    return end_ < kTileKeys ? (end_ + kGroupTokens - 1) / kGroupTokens : kTileGroups;
  }

 private:
  int begin_;
  int end_;
};

}  // namespace baton

#endif
