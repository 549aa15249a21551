// Chooses the experts of each token, as engine/layers/routing.py does.
//
// Logits are fp32: chains of products in a fixed order, so neither the other rows nor the number of
// threads changes a choice.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

#if defined(BATON_PAIRS)

namespace baton {

constexpr int kMaxExperts = 1024;  // MAX_EXPERTS in experts_config.py
constexpr int kRouterRows = 4;     // and experts, of a block of logits
constexpr float kSmallestSum = 1e-20f;

// Mirrors `_Router` in native_experts.py; see ExpertsConfig for the rules.
struct Router {
  const float* weight;       // [experts, hidden]
  const float* bias;         // of the logits, [experts], or null
  const float* choice_bias;  // [experts], or null
  int32_t hidden;
  int32_t experts;
  int32_t per_token;
  int32_t groups;
  int32_t chosen_groups;
  int32_t is_sigmoid;  // else softmax
  int32_t normalizes;
  int32_t sums_two;    // a group's score is the sum of its two largest
  float scale;
};

// Products of R rows of x with E rows of weights, all of length `size`; writes logits, rows
// `stride` apart.
template <int R, int E>
inline void dot_rows(const Bf16* x, const float* weight, int size, float* logits, int stride) {
  Vec acc[R][E] = {};
  const auto add = [&](auto read, int i) BATON_INLINE {
    Vec right[E];
    for (int e = 0; e < E; ++e) right[e] = read(weight + (int64_t)e * size + i);
    for (int r = 0; r < R; ++r) {
      const Vec left = read(x + (int64_t)r * size + i);
      for (int e = 0; e < E; ++e) acc[r][e] += left * right[e];
    }
  };
  int i = 0;
  for (; i + kLanes <= size; i += kLanes)
    add([](const auto* at) BATON_INLINE { return load(at); }, i);
  if (i < size) add([=](const auto* at) BATON_INLINE { return load_some(at, size - i); }, i);
  for (int r = 0; r < R; ++r)
    for (int e = 0; e < E; ++e) logits[r * stride + e] = sum(acc[r][e]);
}

// Writes one block of the logits of `rows` tokens, [rows, experts].
inline void block_logits(const Router& router, const Bf16* x, int64_t rows, int64_t row, int expert,
                         float* logits) {
  const int size = router.hidden, stride = router.experts;
  const int64_t end_row = std::min(row + kRouterRows, rows);
  const int end = std::min(expert + kRouterRows, (int)router.experts);
  const float* weight = router.weight + (int64_t)expert * size;
  float* to = logits + row * stride + expert;
  if (end_row - row == kRouterRows && end - expert == kRouterRows)
    return dot_rows<kRouterRows, kRouterRows>(x + row * size, weight, size, to, stride);
  for (; row < end_row; ++row, to += stride)
    for (int e = expert; e < end; ++e)
      dot_rows<1, 1>(x + row * size, router.weight + (int64_t)e * size, size, to + e - expert,
                     stride);
}

// Computes the logits of all tokens. All threads of a parallel region call it; it ends with a
// barrier.
inline void router_logits(const Router& router, const Bf16* x, int64_t rows, float* logits) {
  const int64_t by = kRouterRows, columns = (router.experts + by - 1) / by;
  const int64_t blocks = (rows + by - 1) / by * columns;
#pragma omp for schedule(static)
  for (int64_t block = 0; block < blocks; ++block)
    block_logits(router, x, rows, block / columns * by, (int)(block % columns * by), logits);
}

// The indices of the `count` largest of `values` [size], the largest first; among equal values the
// first ones.
inline void largest_places(const float* values, int size, int count, int32_t* places) {
  for (int i = 0, kept = 0; i < size; ++i) {
    if (kept == count && !(values[i] > values[places[count - 1]])) continue;
    int at = kept < count ? kept++ : count - 1;
    for (; at > 0 && values[i] > values[places[at - 1]]; --at) places[at] = places[at - 1];
    places[at] = i;
  }
}

inline void scores_of(const Router& router, const float* logits, float* scores) {
  const int count = router.experts;
  if (router.is_sigmoid) {
    for (int e = 0; e < count; ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    return;
  }
  const float top = *std::max_element(logits, logits + count);
  float total = 0;
  for (int e = 0; e < count; ++e) total += scores[e] = std::exp(logits[e] - top);
  for (int e = 0; e < count; ++e) scores[e] /= total;
}

// Writes -inf outside the chosen groups.
inline void keep_best_groups(const Router& router, float* ranked) {
  const int size = router.experts / router.groups, counted = router.sums_two ? 2 : 1;
  float of_group[kMaxExperts];
  int32_t best[kMaxExperts], top[2];
  for (int g = 0; g < router.groups; ++g) {
    largest_places(ranked + g * size, size, counted, top);
    of_group[g] = ranked[g * size + top[0]];
    if (router.sums_two) of_group[g] += ranked[g * size + top[1]];
  }
  largest_places(of_group, router.groups, router.groups, best);
  for (int i = router.chosen_groups; i < router.groups; ++i)
    std::fill_n(ranked + best[i] * size, size, -std::numeric_limits<float>::infinity());
}

// Chooses one token's experts and their weights from its logits, [per_token] each.
inline void choose_experts(const Router& router, const float* logits, int32_t* chosen,
                           float* weights) {
  float scores[kMaxExperts], ranked[kMaxExperts];
  if (router.bias != nullptr) {
    for (int e = 0; e < router.experts; ++e) ranked[e] = logits[e] + router.bias[e];
    logits = ranked;
  }
  scores_of(router, logits, scores);
  for (int e = 0; e < router.experts; ++e)
    ranked[e] = router.choice_bias == nullptr ? scores[e] : scores[e] + router.choice_bias[e];
  if (router.groups > 1) keep_best_groups(router, ranked);
  largest_places(ranked, router.experts, router.per_token, chosen);
  float total = 0;
  for (int i = 0; i < router.per_token; ++i) total += weights[i] = scores[chosen[i]];
  const float divisor = router.normalizes ? total + kSmallestSum : 1.0f;
  for (int i = 0; i < router.per_token; ++i) weights[i] = weights[i] / divisor * router.scale;
}

}  // namespace baton

#endif
