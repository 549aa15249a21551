// A mixture of experts: rows of the tokens are sorted by expert, each expert that has rows multiplies
// its own, and every token adds up what its experts give.
//
// Within a parallel region, whose threads share every stage and meet at its end. No memory is taken.

#pragma once

#include "elementwise.h"
#include "linear.h"
#include "routing.h"

#if defined(BATON_PAIRS)

namespace baton {

// Mirrors `_Weights` in native_experts.py.
struct ExpertsWeights {
  Router router;
  const LinearWeight* gate_up;  // [experts]
  const LinearWeight* down;     // [experts]
  LinearWeight shared_gate_up;  // without outputs: no shared expert
  LinearWeight shared_down;
  const float* shared_gate;     // [hidden]: a logit that the shared expert is weighted by; or null
  int64_t* tally;               // [3]: totals as in engine/expert_loads.py
  int64_t gate;                 // see Gate
};

// Working memory; mirrors `MemoryAddresses` in native_experts.py. A pair is a token with one of its experts;
// those of an expert lie together, from a multiple of kGroupAlignment on.
struct ExpertsMemory {
  float* logits;     // [tokens, experts]
  int32_t* chosen;   // [tokens, per_token]
  float* weights;    // [tokens, per_token]
  int32_t* places;   // [tokens, per_token]: where the pair lies
  int32_t* begins;   // [experts]
  int32_t* counts;   // [experts]
  Bf16* rows;        // [pairs, hidden]
  Bf16* gate_up;     // [pairs, 2 * inner]
  Bf16* gated;       // [pairs, inner]
  Bf16* down;        // [pairs, hidden]
};

// Mirrors `_Call` in native_experts.py.
struct ExpertsCall {
  const ExpertsWeights* weights;
  ExpertsMemory memory;
  const Bf16* x;    // [rows, hidden], normed
  const Bf16* add;  // [rows, hidden], or null; may be `out`
  Bf16* out;        // [rows, hidden]
  int64_t rows;
  int32_t num_threads;
};

inline void gate_rows(int32_t kind, const Bf16* gate_up, int64_t rows, int size, Bf16* out) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const Bf16* gate = gate_up + 2 * row * size;
    gate_row(kind, gate, gate + size, size, out + row * size);
  }
}

// out = add + weight(row) * row, rounded once.
inline void add_weighted(const Bf16* row, float weight, const Bf16* add, int size, Bf16* out) {
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vec y = load(row + i) * weight;
    store(out + i, add == nullptr ? y : load(add + i) + y);
  }
  if (i < size) {
    const int count = size - i;
    const Vec y = load_some(row + i, count) * weight;
    store_some(out + i, add == nullptr ? y : load_some(add + i, count) + y, count);
  }
}

inline void add_shared(const ExpertsCall& call) {
  const ExpertsWeights& weights = *call.weights;
  const ExpertsMemory& memory = call.memory;
  const int hidden = weights.router.hidden, threads = call.num_threads;
  linear({weights.shared_gate_up, call.x, nullptr, memory.gate_up, nullptr, call.rows, threads});
  gate_rows((int32_t)weights.gate, memory.gate_up, call.rows, weights.shared_down.inputs,
            memory.gated);
  if (weights.shared_gate == nullptr)
    return linear({weights.shared_down, memory.gated, call.add, call.out, nullptr, call.rows,
                   threads});
  linear({weights.shared_down, memory.gated, nullptr, memory.down, nullptr, call.rows, threads});
#pragma omp for schedule(static)
  for (int64_t row = 0; row < call.rows; ++row) {
    const int64_t at = row * hidden;
    float logit;
    dot_rows<1, 1>(call.x + at, weights.shared_gate, hidden, &logit, 1);
    add_weighted(memory.down + at, 1.0f / (1.0f + std::exp(-logit)),
                 call.add == nullptr ? nullptr : call.add + at, hidden, call.out + at);
  }
}

// Gives each pair its place, and counts the experts' rows. Returns the number of rows, gaps between
// experts included.
inline int64_t sort_pairs(const ExpertsCall& call) {
  const ExpertsWeights& weights = *call.weights;
  const ExpertsMemory& memory = call.memory;
  const int experts = weights.router.experts;
  const int64_t pairs = call.rows * weights.router.per_token;
  std::fill_n(memory.counts, experts, 0);
  for (int64_t pair = 0; pair < pairs; ++pair)
    memory.places[pair] = memory.counts[memory.chosen[pair]]++;
  weights.tally[0] += pairs;
  weights.tally[1] += *std::max_element(memory.counts, memory.counts + experts);
  int64_t end = 0;
  for (int e = 0; e < experts; ++e) {
    memory.begins[e] = (int32_t)end;
    weights.tally[2] += memory.counts[e] > 0;
    end += (memory.counts[e] + kGroupAlignment - 1) / kGroupAlignment * kGroupAlignment;
  }
  for (int64_t pair = 0; pair < pairs; ++pair)
    memory.places[pair] += memory.begins[memory.chosen[pair]];
  return end;
}

// Copies a row of x for each pair.
inline void copy_rows(const ExpertsCall& call) {
  const int hidden = call.weights->router.hidden, per_token = call.weights->router.per_token;
#pragma omp for schedule(static)
  for (int64_t row = 0; row < call.rows; ++row)
    for (int i = 0; i < per_token; ++i)
      std::memcpy(call.memory.rows + (int64_t)call.memory.places[row * per_token + i] * hidden,
                  call.x + row * hidden, hidden * sizeof(Bf16));
}

// The weighted sum of what a token's experts give, in the order of their scores, rounded once.
inline void add_experts(const ExpertsCall& call, const Bf16* add, int64_t row) {
  const int hidden = call.weights->router.hidden, per_token = call.weights->router.per_token;
  const int32_t* places = call.memory.places + row * per_token;
  const float* weights = call.memory.weights + row * per_token;
  const auto add_up = [&](auto read, int at) BATON_INLINE {
    Vec y = add == nullptr ? Vec{} : read(add + row * hidden + at);
    for (int i = 0; i < per_token; ++i)
      y += read(call.memory.down + (int64_t)places[i] * hidden + at) * weights[i];
    return y;
  };
  Bf16* out = call.out + row * hidden;
  int i = 0;
  for (; i + kLanes <= hidden; i += kLanes)
    store(out + i, add_up([](const Bf16* at) BATON_INLINE { return load(at); }, i));
  if (const int count = hidden - i; count > 0)
    store_some(out + i,
               add_up([=](const Bf16* at) BATON_INLINE { return load_some(at, count); }, i), count);
}

// Within a parallel region, by all of its threads.
inline void run_experts(const ExpertsCall& call) {
  const ExpertsWeights& weights = *call.weights;
  const ExpertsMemory& memory = call.memory;
  const Router& router = weights.router;
  const bool has_shared = weights.shared_gate_up.outputs > 0;
  if (has_shared) add_shared(call);
  router_logits(router, call.x, call.rows, memory.logits);
#pragma omp for schedule(static)
  for (int64_t row = 0; row < call.rows; ++row)
    choose_experts(router, memory.logits + row * router.experts,
                   memory.chosen + row * router.per_token, memory.weights + row * router.per_token);
  int64_t end = 0;
#pragma omp single copyprivate(end)
  end = sort_pairs(call);
  copy_rows(call);
  GroupedCall grouped{weights.gate_up, memory.begins, memory.counts, memory.rows, memory.gate_up,
                      end, router.experts, call.num_threads};
  grouped_linear(grouped);
  gate_rows((int32_t)weights.gate, memory.gate_up, end, weights.down[0].inputs, memory.gated);
  grouped.weights = weights.down;
  grouped.x = memory.gated;
  grouped.out = memory.down;
  grouped_linear(grouped);
  const Bf16* add = has_shared ? call.out : call.add;
#pragma omp for schedule(static)
  for (int64_t row = 0; row < call.rows; ++row) add_experts(call, add, row);
}

}  // namespace baton

#endif
