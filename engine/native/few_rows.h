// Attention of up to eight query rows of each KV head, as decode has them, over pairs of bf16 where
// they lie in the pool: to put keys and values in the order of the products would take longer than
// the products.
//
// Keys are taken by sixteen, of all heads of a unit, then their values: in a block that is one
// stretch of memory after the other, which cores read faster than pieces from here and there. (Short
// heads gain nothing: the products are a smaller part, and a stretch ends sooner.) A score is a dot product along the head, whose lanes are summed
// at the end, of sixteen keys at once. Values of two keys are interleaved within 128-bit lanes as
// they are read, which is one cheap instruction but leaves the columns of each 32 in another order;
// `straighten` undoes it, once.

#pragma once

#include "attention_call.h"

namespace baton {

constexpr int kFewRows = 8;
constexpr int kRowsAtOnce = 4;   // as registers allow
constexpr int kFewKeys = 16;
constexpr int kFewHead = 128;    // columns of a head, at least
constexpr int kFewStep = 32;     // at a time
constexpr int kFewAhead = 8192;  // bytes from what is read to what is asked for

// Attends to all keys of a unit that has few rows of a head; false of any other.
template <class P, class Word>
bool attend_few(const AttentionCall&, const Unit&, Tile<Word>&) {
  return false;
}

#if defined(__AVX512BF16__)
inline __m512i load_all_pairs(const Bf16* at) { return _mm512_loadu_si512(at); }
inline __m512i load_all_pairs(const Fp8* at) { return load_pairs(0xffffffffu, at); }

// Lines of a stretch of memory that will be needed soon, asked for on the way of something else.
class Stretch {
 public:
  Stretch(const void* begin, size_t bytes) : at_((const char*)begin), end_(at_ + bytes) {}

  void ask(int lines) {
    for (; lines > 0 && at_ < end_; --lines, at_ += 64) __builtin_prefetch(at_);
  }
  int in_steps(int steps) const { return (int)((end_ - at_) / 64 + steps - 1) / steps; }

 private:
  const char* at_;
  const char* end_;
};

// Scores [R, 16] of R rows of q with 16 keys.
template <class P, int R>
inline void score_few(const int32_t* q, const P* keys, int head_dim, float* scores,
                      Stretch ahead) {
  if constexpr (R > kRowsAtOnce) {
    score_few<P, kRowsAtOnce>(q, keys, head_dim, scores, ahead);
    score_few<P, R - kRowsAtOnce>(q + kRowsAtOnce * head_dim / 2, keys, head_dim,
                                  scores + kRowsAtOnce * kFewKeys, Stretch(nullptr, 0));
    return;
  }
  const auto sum_of = [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); };
  const int asked = ahead.in_steps(kFewKeys / 4);
  __m512 fours[R][4];
  for (int four = 0; four < 4; ++four) {
    ahead.ask(asked);
    const P* at = keys + (size_t)four * 4 * head_dim;
    __m512 products[R][4];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < 4; ++i) products[r][i] = _mm512_setzero_ps();
    for (int d = 0; d < head_dim; d += kFewStep) {
      __m512bh key[4];
      for (int i = 0; i < 4; ++i) key[i] = (__m512bh)load_all_pairs(at + i * head_dim + d);
      for (int r = 0; r < R; ++r) {
        const __m512bh query = (__m512bh)_mm512_loadu_si512(q + (r * head_dim + d) / 2);
        for (int i = 0; i < 4; ++i)
          products[r][i] = _mm512_dpbf16_ps(products[r][i], query, key[i]);
      }
    }
    for (int r = 0; r < R; ++r) fours[r][four] = combine_within(products[r], sum_of);
  }
  for (int r = 0; r < R; ++r)
    _mm512_storeu_ps(scores + r * kFewKeys, combine_across(fours[r], sum_of));
}

// Columns `begin` to `begin` + 32 * C of `sums` [R, head_dim], plus weights [R, 8 pairs] times
// values.
template <class P, int R, int C>
inline void weigh_columns(const int32_t* weights, const P* values, int head_dim, int begin,
                          float* sums, Stretch& ahead, int asked) {
  __m512 low[R][C], high[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      const float* from = sums + r * head_dim + begin + c * kFewStep;
      low[r][c] = _mm512_loadu_ps(from);
      high[r][c] = _mm512_loadu_ps(from + kLanes);
    }
  for (int pair = 0; pair < kFewKeys / 2; ++pair) {
    ahead.ask(asked);
    const P* even = values + (size_t)pair * 2 * head_dim + begin;
    __m512bh left[R];
    for (int r = 0; r < R; ++r)
      left[r] = (__m512bh)_mm512_set1_epi32(weights[r * (kFewKeys / 2) + pair]);
    for (int c = 0; c < C; ++c) {
      const __m512i a = load_all_pairs(even + c * kFewStep);
      const __m512i b = load_all_pairs(even + head_dim + c * kFewStep);
      const __m512bh lower = (__m512bh)_mm512_unpacklo_epi16(a, b);
      const __m512bh upper = (__m512bh)_mm512_unpackhi_epi16(a, b);
      for (int r = 0; r < R; ++r) {
        low[r][c] = _mm512_dpbf16_ps(low[r][c], left[r], lower);
        high[r][c] = _mm512_dpbf16_ps(high[r][c], left[r], upper);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      float* to = sums + r * head_dim + begin + c * kFewStep;
      _mm512_storeu_ps(to, low[r][c]);
      _mm512_storeu_ps(to + kLanes, high[r][c]);
    }
}

template <class P, int R>
inline void weigh_few(const int32_t* weights, const P* values, int head_dim, float* sums,
                      Stretch ahead) {
  if constexpr (R > kRowsAtOnce) {
    weigh_few<P, kRowsAtOnce>(weights, values, head_dim, sums, ahead);
    weigh_few<P, R - kRowsAtOnce>(weights + kRowsAtOnce * kFewKeys / 2, values, head_dim,
                                  sums + kRowsAtOnce * head_dim, Stretch(nullptr, 0));
    return;
  }
  constexpr int kSteps = R <= 2 ? 4 : 2;  // as many accumulators as registers hold
  constexpr int kColumns = kSteps * kFewStep;
  const int passes = head_dim / kColumns + head_dim % kColumns / kFewStep;
  const int asked = ahead.in_steps(kFewKeys / 2 * passes);
  int begin = 0;
  for (; begin + kColumns <= head_dim; begin += kColumns)
    weigh_columns<P, R, kSteps>(weights, values, head_dim, begin, sums, ahead, asked);
  for (; begin < head_dim; begin += kFewStep)
    weigh_columns<P, R, 1>(weights, values, head_dim, begin, sums, ahead, asked);
}

// The columns of a row of sums in their own order.
inline void straighten(float* sums, int head_dim) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int d = 0; d < head_dim; d += kFewStep) {
    const __m512 low = _mm512_loadu_ps(sums + d), high = _mm512_loadu_ps(sums + d + kLanes);
    _mm512_storeu_ps(sums + d, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(sums + d + kLanes, _mm512_permutex2var_ps(low, second, high));
  }
}

// Where a unit's keys and values lie, in the order in which they are read: sixteen keys of each head
// in turn, their values, the next sixteen keys.
template <class P>
class FewKeys {
 public:
  FewKeys(const AttentionCall& call, const Unit& unit)
      : call_(call), unit_(unit), stretch_((size_t)kFewKeys * call.head_dim * sizeof(P)) {}

  // What is read in the given turn, counted from the keys of the unit's first head at `first`.
  const P* at(int first, int turn) const {
    const int heads = unit_.num_kv_heads;
    for (; turn >= 2 * heads; turn -= 2 * heads) first += kFewKeys;
    if (first >= unit_.end_key) return nullptr;
    const int64_t block = call_.tables[unit_.table + first / call_.block_size];
    const bool values = turn >= heads;
    const int head = unit_.kv_head + (values ? turn - heads : turn);
    return (const P*)call_.pool + block * call_.block_stride + (values ? call_.value_offset : 0) +
           ((int64_t)head * call_.block_size + first % call_.block_size) * call_.head_dim;
  }

  // The same, or a copy of it in which keys that are not the unit's are zeros.
  const P* read(int first, int turn, void* copy) const {
    const P* from = at(first, turn);
    const int begin = unit_.first_key > first ? unit_.first_key - first : 0;
    const int end = unit_.end_key - first < kFewKeys ? unit_.end_key - first : kFewKeys;
    if (begin == 0 && end == kFewKeys) return from;
    std::memset(copy, 0, stretch_);
    std::memcpy((P*)copy + (size_t)begin * call_.head_dim, from + (size_t)begin * call_.head_dim,
                (size_t)(end - begin) * call_.head_dim * sizeof(P));
    return (const P*)copy;
  }

  Stretch ahead(int first, int turn) const {
    const P* next = at(first, turn + (int)((kFewAhead + stretch_ - 1) / stretch_));
    return Stretch(next, next == nullptr ? 0 : stretch_);
  }

 private:
  const AttentionCall& call_;
  const Unit& unit_;
  const size_t stretch_;  // bytes
};

// Which of sixteen keys from `first` on a query of the unit sees.
inline __mmask16 visible_few(const AttentionCall& call, const Unit& unit, int query, int first) {
  int begin = unit.first_key, end = unit.end_key;
  if (call.window > 0 && query - call.window + 1 > begin) begin = query - call.window + 1;
  if (query + 1 < end) end = query + 1;
  begin = begin > first ? begin - first : 0;
  end = end < first + kFewKeys ? end - first : kFewKeys;
  if (begin >= end) return 0;
  return (__mmask16)((0xffffu << begin) & (0xffffu >> (kFewKeys - end)));
}

// Scores of a row with sixteen keys become weights.
inline void soften_few(Tile<PairWord>& tile, int row, __mmask16 visible, int head_dim,
                       float scale) {
  int32_t* weights = tile.p + (size_t)row * (kFewKeys / 2);
  if (visible == 0) {
    std::memset(weights, 0, kFewKeys * 2);
    return;
  }
  const float before = tile.highest[row];
  const Vec scores = load(tile.scores + (size_t)row * kFewKeys) * scale;
  const Vec seen = (Vec)_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), visible, (__m512)scores);
  const float highest = largest(larger(seen, splat(before)));
  const Vec all = exp2_bounded<true>(seen - highest);
  const Vec weight = (Vec)_mm512_maskz_mov_ps(visible, (__m512)all);
  store((Bf16*)weights, weight);
  if (highest != before) {
    const float shrink = before == -INFINITY ? 0.0f : std::exp2(before - highest);
    float* sums = tile.sums + (size_t)row * head_dim;
    for (int d = 0; d < head_dim; d += kLanes) store(sums + d, load(sums + d) * shrink);
    tile.totals[row] *= shrink;
    tile.highest[row] = highest;
  }
  tile.totals[row] += weight;
}

// All keys of a unit with R rows of each head.
template <class P, int R>
void attend_rows(const AttentionCall& call, const Unit& unit, Tile<PairWord>& tile) {
  const int head_dim = call.head_dim, heads = unit.num_kv_heads;
  const int group = call.num_heads / call.num_kv_heads;
  const FewKeys<P> keys(call, unit);
  for (int first = unit.first_key / kFewKeys * kFewKeys; first < unit.end_key; first += kFewKeys) {
    for (int head = 0; head < heads; ++head)
      score_few<P, R>(tile.q + (size_t)head * R * head_dim / 2,
                      keys.read(first, head, tile.keys), head_dim,
                      tile.scores + (size_t)head * R * kFewKeys, keys.ahead(first, head));
    for (int row = 0; row < heads * R; ++row)
      soften_few(tile, row, visible_few(call, unit, unit.position + row % R / group, first),
                 head_dim, call.scale);
    for (int head = 0; head < heads; ++head)
      weigh_few<P, R>(tile.p + (size_t)head * R * kFewKeys / 2,
                      keys.read(first, heads + head, tile.values), head_dim,
                      tile.sums + (size_t)head * R * head_dim, keys.ahead(first, heads + head));
  }
  for (int row = 0; row < heads * R; ++row)
    straighten(tile.sums + (size_t)row * head_dim, head_dim);
}

template <class P>
bool attend_few(const AttentionCall& call, const Unit& unit, Tile<PairWord>& tile) {
  static constexpr decltype(&attend_rows<P, 1>) kByRows[kFewRows] = {
      attend_rows<P, 1>, attend_rows<P, 2>, attend_rows<P, 3>, attend_rows<P, 4>,
      attend_rows<P, 5>, attend_rows<P, 6>, attend_rows<P, 7>, attend_rows<P, 8>};
  const int rows = unit.num_queries * (call.num_heads / call.num_kv_heads);
  if (rows > kFewRows || call.head_dim < kFewHead || call.head_dim % kFewStep != 0 ||
      call.block_size % kFewKeys != 0)
    return false;
  kByRows[rows - 1](call, unit, tile);
  return true;
}
#endif

}  // namespace baton
