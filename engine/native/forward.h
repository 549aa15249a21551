// A decoder's layers in one call: between two products no memory is allocated and no Python runs.
//
// One parallel region; its threads share every stage and meet at the end of each. The stages are
// those of decoder.py: norm, qkv, rotation, attention, o, norm, then gate and up, gate, down, or a
// mixture of experts; what o and down give may be normed before it is added. In the last layer,
// tokens whose hidden state is not wanted go no further than their keys and values.

#pragma once

#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "linear.h"
#include "rank_sums.h"

#if defined(BATON_PAIRS)

namespace baton {

// Mirrors `_Layer` in fused_layers.py.
struct LayerWeights {
  LinearWeight qkv;
  LinearWeight o;
  LinearWeight gate_up;           // without outputs: `experts`
  LinearWeight down;
  const ExpertsWeights* experts;
  const float* input_norm;             // [hidden]
  const float* post_norm;              // [hidden]
  const float* qk_norm;                // [heads + kv_heads, head_dim], or null
  const float* sinks;                  // [heads], or null
  const float* attention_out_norm;     // [hidden], or null
  const float* feed_forward_out_norm;  // [hidden], or null: of a mixture it is
  int64_t attention;                   // index of the layer's plan
  int64_t pool_layer;                  // index of the layer in the plan's pool
  int64_t pool_start;                  // where it begins in a block, in bytes
  int64_t head_stride;                 // between heads there
  int64_t rope;                        // index of the layer's cos and sin
};

// Mirrors `Forward` in fused_layers.py.
struct ForwardCall {
  const LayerWeights* layers;
  const AttentionCall* const* attention;  // by plan; the pool is that of all layers
  const AttentionCall* last;              // of the wanted tokens in the last layer; null: all are
  const int64_t* wanted;                  // [num_wanted], ascending
  Bf16* x;                                // [tokens, hidden], changed in place: the wanted ones
  Bf16* normed;                           // [tokens, hidden]
  Bf16* qkv;                              // [tokens, heads + 2 * kv_heads, head_dim]
  Bf16* heads;                            // [tokens, heads, head_dim]
  Bf16* gate_up;                          // [tokens, 2 * intermediate]
  Bf16* gated;                            // [tokens, intermediate]
  ExpertsMemory experts;
  const int64_t* positions;               // [tokens]
  const float* cos[2];                    // of every position, head_dim / 2 each
  const float* sin[2];
  int64_t tokens;
  int64_t num_wanted;
  int64_t num_layers;
  int32_t num_threads;
  int32_t gate;
  float eps;
  RankSums* ranks;                        // that have the other parts of each layer; null: none
};

// What a product is added to. Among several ranks only the first one adds.
inline const Bf16* residual(const ForwardCall& call) {
  return call.ranks == nullptr || call.ranks->rank == 0 ? call.x : nullptr;
}

// Replaces a rank's parts of the first `rows` rows by the sums of all ranks' parts.
inline void sum_parts(const ForwardCall& call, Bf16* parts, int hidden, int64_t rows) {
  if (call.ranks == nullptr) return;
#pragma omp single
  add_up(*call.ranks, parts, rows * hidden);
}

inline void normalize(const ForwardCall& call, const float* weight, int hidden, int64_t rows) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; ++row)
    normalize_row(call.x + row * hidden, weight, hidden, call.eps, call.normed + row * hidden);
}

// Adds the normed rows of `normed` to the residual.
inline void add_normalized(const ForwardCall& call, const float* weight, int hidden, int64_t rows) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    Bf16* x = call.x + row * hidden;
    add_normalized_row(call.normed + row * hidden, weight, hidden, call.eps, x, x);
  }
}

// Calls action with a number of the type that the pool holds.
template <class Action>
void with_pool_type(const AttentionCall& attention, const Action& action) {
  if (attention.is_fp8) action(Fp8{});
  else if (attention.spans != nullptr) action(Split{});
  else action(Bf16{});
}

// `P` is the type of the numbers in the pool.
template <class P>
void rotate_and_attend(const RotationCall& rotation, const int64_t* positions,
                       const AttentionCall& attention) {
#pragma omp for schedule(static)
  for (int64_t token = 0; token < rotation.tokens; ++token)
    write_tokens<Bf16, P>(attention, token,
                          [&](int64_t t) { rotate_token(rotation, t, positions[t]); });
  attend_planned<Bf16, P, PairWord>(attention);
}

// A plan with what it works on: heads in `call.qkv`, the layer's part of the pool.
inline AttentionCall attention_of(const ForwardCall& call, const LayerWeights& layer,
                                  const AttentionCall& plan) {
  AttentionCall attention = plan;
  const int64_t num_heads = attention.num_heads, kv_heads = attention.num_kv_heads;
  attention.pool = (char*)attention.pool + layer.pool_start;
  attention.head_stride = layer.head_stride;
  if (attention.spans != nullptr) attention.spans += layer.pool_layer * attention.layer_spans;
  attention.q = call.qkv;
  attention.k = call.qkv + num_heads * attention.head_dim;
  attention.v = call.qkv + (num_heads + kv_heads) * attention.head_dim;
  attention.out = call.heads;
  attention.sinks = layer.sinks;
  attention.q_stride = attention.kv_stride = layer.qkv.outputs;
  return attention;
}

// The rotation of `count` heads from `first` on, for all tokens.
inline RotationCall rotation_of(const ForwardCall& call, const LayerWeights& layer, int head_dim,
                                int64_t first, int64_t count) {
  const int64_t offset = first * head_dim;
  return {call.qkv + offset, layer.qk_norm == nullptr ? nullptr : layer.qk_norm + offset,
          call.cos[layer.rope], call.sin[layer.rope],
          call.tokens,       layer.qkv.outputs,
          (int32_t)count,    head_dim,
          call.num_threads,  call.eps};
}

// Adds a product to the residual, normed if there is a norm.
inline void add_product(const ForwardCall& call, const LinearWeight& weight, const Bf16* x,
                        const float* norm, int64_t rows) {
  if (norm == nullptr) {
    linear({weight, x, residual(call), call.x, nullptr, rows, call.num_threads});
    return sum_parts(call, call.x, weight.outputs, rows);
  }
  linear({weight, x, nullptr, call.normed, nullptr, rows, call.num_threads});
  sum_parts(call, call.normed, weight.outputs, rows);
  add_normalized(call, norm, weight.outputs, rows);
}

// Adds the attention of the first `rows` rows to the residual in `x`.
inline void finish_layer(const ForwardCall& call, const LayerWeights& layer, int64_t rows) {
  const int hidden = layer.qkv.inputs, threads = call.num_threads;
  add_product(call, layer.o, call.heads, layer.attention_out_norm, rows);
  normalize(call, layer.post_norm, hidden, rows);
  if (layer.experts != nullptr) {
    run_experts({layer.experts, call.experts, call.normed, residual(call), call.x, rows, threads});
    return sum_parts(call, call.x, hidden, rows);
  }
  linear({layer.gate_up, call.normed, nullptr, call.gate_up, nullptr, rows, threads});
  gate_rows(call.gate, call.gate_up, rows, layer.down.inputs, call.gated);
  add_product(call, layer.down, call.gated, layer.feed_forward_out_norm, rows);
}

inline void run_layer(const ForwardCall& call, const LayerWeights& layer) {
  normalize(call, layer.input_norm, layer.qkv.inputs, call.tokens);
  linear({layer.qkv, call.normed, nullptr, call.qkv, nullptr, call.tokens, call.num_threads});
  const AttentionCall attention = attention_of(call, layer, *call.attention[layer.attention]);
  const RotationCall rotation = rotation_of(call, layer, attention.head_dim, 0,
                                            attention.num_heads + attention.num_kv_heads);
  with_pool_type(attention, [&](auto held) {
    rotate_and_attend<decltype(held)>(rotation, call.positions, attention);
  });
  finish_layer(call, layer, call.tokens);
}

inline void store_keys_and_values(const RotationCall& keys, const int64_t* positions,
                                  const AttentionCall& attention) {
  const auto rotate = [&](int64_t token) { rotate_token(keys, token, positions[token]); };
  with_pool_type(attention, [&](auto held) {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < keys.tokens; ++token)
      write_tokens<Bf16, decltype(held)>(attention, token, rotate);
  });
}

// Moves the rows of the wanted tokens to the front; they are ascending, so no row is overwritten
// before it is read.
inline void gather_wanted(const ForwardCall& call, int hidden) {
#pragma omp single
  for (int64_t row = 0; row < call.num_wanted; ++row)
    for (Bf16* rows : {call.x, call.normed})
      std::memmove(rows + row * hidden, rows + call.wanted[row] * hidden, hidden * sizeof(Bf16));
}

// Computes the keys and values of all tokens, and everything else for the wanted ones only.
inline void run_last_layer(const ForwardCall& call, const LayerWeights& layer) {
  const int hidden = layer.qkv.inputs, threads = call.num_threads, head_dim = call.last->head_dim;
  const int64_t num_heads = call.last->num_heads, q_outputs = num_heads * head_dim;
  normalize(call, layer.input_norm, hidden, call.tokens);
  linear_part({layer.qkv, call.normed, nullptr, call.qkv, nullptr, call.tokens, threads},
              (int)(q_outputs / kPanelOutputs), num_panels(layer.qkv));
  store_keys_and_values(
      rotation_of(call, layer, head_dim, num_heads, call.last->num_kv_heads), call.positions,
      attention_of(call, layer, *call.attention[layer.attention]));
  gather_wanted(call, hidden);
  linear_part({layer.qkv, call.normed, nullptr, call.qkv, nullptr, call.num_wanted, threads}, 0,
              (int)((q_outputs + kPanelOutputs - 1) / kPanelOutputs));
  const RotationCall queries = rotation_of(call, layer, head_dim, 0, num_heads);
#pragma omp for schedule(static)
  for (int64_t row = 0; row < call.num_wanted; ++row)
    rotate_token(queries, row, call.positions[call.wanted[row]]);
  const AttentionCall attention = attention_of(call, layer, *call.last);
  with_pool_type(attention, [&](auto held) {
    attend_planned<Bf16, decltype(held), PairWord>(attention);
  });
  finish_layer(call, layer, call.num_wanted);
}

// Within a parallel region, by all of its threads.
inline void run_layers(const ForwardCall& call) {
  for (int64_t index = 0; index < call.num_layers; ++index)
    if (call.last != nullptr && index + 1 == call.num_layers)
      run_last_layer(call, call.layers[index]);
    else
      run_layer(call, call.layers[index]);
}

}  // namespace baton

#endif
