// Which keys of a tile the rows of a unit see, and how scores become weights.

#pragma once

#include "attention_call.h"

namespace baton {

// Keys of a tile that a row sees: those in [begin, end).
struct Seen {
  int begin;
  int end;
};

// The keys that the rows of a head see in the tile of keys from `first` on.
struct View {
  int position;  // of the first query
  int group;     // rows of a query
  int rows;
  int first;
  int first_key;  // of the unit's range
  int end_key;
  int window;

  Seen of(int row) const {
    const int query = position + (rows == group ? 0 : row / group);  // decode divides nothing
    const int end = (query + 1 < end_key ? query + 1 : end_key) - first;
    const int oldest = window > 0 && query - window + 1 > first_key ? query - window + 1 : first_key;
    return {oldest - first, end < kTileKeys ? end : kTileKeys};
  }
};

// Column j of a row, with `other` in place of keys that are not seen.
inline Vec seen_only(Vec x, int j, Seen seen, float other) {
  const IntVec key = lane_numbers() + j * kLanes;
  return select((key >= seen.begin) & (key < seen.end), x, splat(other));
}

// Weights are relative to a reference score, whose weight is 1. None is larger than 2^kSlack: a
// score whose weight would be becomes the reference, and the sums so far are rescaled. For most
// rows the first tile sets the final reference.
constexpr float kSlack = 8.0f;

// Scores of up to 16 rows over a tile become weights; `sums` and `totals` follow where a reference
// has grown. In a whole tile every row sees every key. The largest scores of all rows are found
// together, because the steps for a single row wait for one another.
template <class Word, bool kWhole>
void soften_rows(Tile<Word>& tile, int row0, int rows, const Seen* seen, int padded, float scale) {
  const float* scores = tile.scores + (size_t)row0 * kTileKeys;
  Vec tops[kLanes];
  for (int i = 0; i < kLanes; ++i) tops[i] = splat(-INFINITY);
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < kTileColumns; ++j) {
      const Vec s = load(scores + i * kTileKeys + j * kLanes);
      tops[i] = larger(kWhole ? s : seen_only(s, j, seen[i], -INFINITY), tops[i]);
    }
  float* highest = tile.highest + row0;
  const Vec top = largest_of_each(tops, rows) * scale, before = load(highest);
  const IntVec grows = top > before + kSlack;
  const Vec reference = select(grows, top, before);
  if (any(grows)) {
    const Vec shrink = exp2_bounded<false>(before - reference);
    store(highest, reference);  // rows beyond these stay as they are
    for (int i = 0; i < rows; ++i) {
      if (!grows[i] || before[i] == -INFINITY) continue;  // nothing is summed yet
      float* sums = tile.sums + (size_t)(row0 + i) * padded;
      for (int d = 0; d < padded; d += kLanes) store(sums + d, load(sums + d) * shrink[i]);
      tile.totals[row0 + i] *= shrink[i];
    }
  }
  for (int i = 0; i < rows; ++i) {
    const bool sees_none = highest[i] == -INFINITY;  // so far
    const float unit_score = sees_none ? 0.0f : highest[i];
    Vec weights[kTileColumns], total{};
    for (int j = 0; j < kTileColumns; ++j) {
      const Vec s = load(scores + i * kTileKeys + j * kLanes) * scale - unit_score;
      weights[j] = exp2_bounded<Word::kIsPairs>(s);
      if (!kWhole) weights[j] = seen_only(weights[j], j, seen[i], 0.0f);
      total += weights[j];
    }
    store_weights(tile.p + (size_t)(row0 + i) * (kTileKeys / Word::kPerWord), weights);
    tile.totals[row0 + i] += total;
  }
}

// Replaces the scores of some rows by cap * tanh(score / cap); scores of keys that no row sees may
// become anything.
inline void cap_scores(float* scores, int rows, float scale, float cap) {
  const float twice = -2.0f * 1.44269504f * scale / cap;
  for (int i = 0; i < rows * kTileKeys; i += kLanes) {
    const Vec s = load(scores + i);
    const IntVec positive = s > Vec{};
    const Vec e = exp2_bounded<false>(select(positive, s, -s) * twice);
    store(scores + i, select(positive, splat(cap), splat(-cap)) * ((1.0f - e) / (e + 1.0f)));
  }
}

// The same of any rows of one head, or of all rows of several: `view` has the rows of a head, of
// which the first lies at `row0`; those from `begin` to `end`, counted from there, sixteen at a
// time. For each sixteen rows it is found whether they see all keys.
template <class Word>
void soften(Tile<Word>& tile, int row0, int begin, int end, const View& view, int padded,
            const AttentionCall& call) {
  float scale = call.scale;
  if (call.cap > 0) {
    float* scores = tile.scores + (size_t)(row0 + begin) * kTileKeys;
    cap_scores(scores, end - begin, scale, call.cap);
    scale = 1.0f;
  }
  for (int row = begin; row < end; row += kLanes) {
    const int count = end - row < kLanes ? end - row : kLanes;
    const int first = row % view.rows, last = first + count - 1;
    const bool one_head = last < view.rows;
    const Seen least = view.of(one_head ? first : 0);
    const Seen latest = view.of(one_head ? last : view.rows - 1);
    if (least.end == kTileKeys && latest.begin <= 0) {
      soften_rows<Word, true>(tile, row0 + row, count, nullptr, padded, scale);
      continue;
    }
    Seen seen[kLanes];
    for (int i = 0; i < count; ++i) seen[i] = view.of((row + i) % view.rows);
    soften_rows<Word, false>(tile, row0 + row, count, seen, padded, scale);
  }
}

}  // namespace baton
