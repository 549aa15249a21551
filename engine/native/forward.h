// A decoder's layers in one call: no memory is taken and nobody else is asked between two products.
//
// One parallel region; its threads share every stage and meet at the end of each. The stages are
// those of model.py: norm, qkv, rotation, attention, o, norm, gate and up, gate, down.

#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

#if defined(__AVX512BF16__)

namespace baton {

// Mirrors `_Layer` in fused_layers.py.
struct LayerWeights {
  LinearWeight qkv;
  LinearWeight o;
  LinearWeight gate_up;
  LinearWeight down;
  const Bf16* input_norm;  // [hidden]
  const Bf16* post_norm;   // [hidden]
  const Bf16* qk_norm;     // [heads + kv_heads, head_dim], or null
  int64_t attention;       // index of the layer's plan
};

// Mirrors `_Forward` in fused_layers.py.
struct ForwardCall {
  const LayerWeights* layers;
  const AttentionCall* const* attention;  // by plan; the pool is the first layer's
  Bf16* x;                                // [tokens, hidden], changed in place
  Bf16* normed;                           // [tokens, hidden]
  Bf16* qkv;                              // [tokens, heads + 2 * kv_heads, head_dim]
  Bf16* heads;                            // [tokens, heads, head_dim]
  Bf16* gate_up;                          // [tokens, 2 * intermediate]
  Bf16* gated;                            // [tokens, intermediate]
  const float* cos;                       // [tokens, head_dim / 2]
  const float* sin;
  int64_t tokens;
  int64_t num_layers;
  int64_t layer_bytes;                    // from one layer's pool to the next
  int32_t num_threads;
  float eps;
};

inline void normalize(const ForwardCall& call, const Bf16* weight, int hidden) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < call.tokens; ++row)
    normalize_row(call.x + row * hidden, weight, hidden, call.eps, call.normed + row * hidden);
}

// `P` is what the pool holds.
template <class P>
void rotate_and_attend(const RotationCall& rotation, const AttentionCall& attention) {
#pragma omp for schedule(static)
  for (int64_t token = 0; token < rotation.tokens; ++token) {
    rotate_token(rotation, token);
    write_token<Bf16, P>(attention, token);
  }
  attend_planned<Bf16, P, PairWord>(attention);
}

inline void attention_stage(const ForwardCall& call, const LayerWeights& layer, int64_t index) {
  AttentionCall attention = *call.attention[layer.attention];
  const int64_t num_heads = attention.num_heads, kv_heads = attention.num_kv_heads;
  attention.pool = (char*)attention.pool + index * call.layer_bytes;
  attention.q = call.qkv;
  attention.k = call.qkv + num_heads * attention.head_dim;
  attention.v = call.qkv + (num_heads + kv_heads) * attention.head_dim;
  attention.out = call.heads;
  attention.q_stride = attention.kv_stride = layer.qkv.outputs;
  const RotationCall rotation = {call.qkv,          layer.qk_norm, call.cos,
                                 call.sin,          call.tokens,   layer.qkv.outputs,
                                 (int32_t)(num_heads + kv_heads),  attention.head_dim,
                                 call.num_threads,  call.eps};
  if (attention.is_fp8) rotate_and_attend<Fp8>(rotation, attention);
  else rotate_and_attend<Bf16>(rotation, attention);
}

inline void run_layer(const ForwardCall& call, const LayerWeights& layer, int64_t index) {
  const int hidden = layer.qkv.inputs, threads = call.num_threads;
  normalize(call, layer.input_norm, hidden);
  linear({layer.qkv, call.normed, nullptr, call.qkv, nullptr, call.tokens, threads});
  attention_stage(call, layer, index);
  linear({layer.o, call.heads, call.x, call.x, nullptr, call.tokens, threads});
  normalize(call, layer.post_norm, hidden);
  linear({layer.gate_up, call.normed, nullptr, call.gate_up, nullptr, call.tokens, threads});
  const int size = layer.down.inputs;
#pragma omp for schedule(static)
  for (int64_t row = 0; row < call.tokens; ++row) {
    const Bf16* gate = call.gate_up + 2 * row * size;
    gate_row(gate, gate + size, size, call.gated + row * size);
  }
  linear({layer.down, call.gated, call.x, call.x, nullptr, call.tokens, threads});
}

inline void run_layers(const ForwardCall& call) {
#pragma omp parallel num_threads(call.num_threads)
  for (int64_t index = 0; index < call.num_layers; ++index)
    run_layer(call, call.layers[index], index);
}

}  // namespace baton

#endif
