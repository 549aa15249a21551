// What stands between a layer's matrix products, each in one pass over its rows: RMSNorm, the
// rotary embedding with the norms of q and k before it, and an activation times the gated half.
//
// All arithmetic in fp32, rounded once at the end.

#pragma once

#include <cmath>

#include "simd.h"

namespace baton {

// Activations, as GATES in native_ops.py numbers them.
enum Gate : int32_t { kSilu, kTanhGelu, kClampedSwiglu };

// Mirrors `_Norm` in native_ops.py.
struct NormCall {
  const Bf16* x;        // [rows, size]
  const float* weight;  // [size]
  const Bf16* add;      // [rows, size], or null
  Bf16* out;            // [rows, size]
  int64_t rows;
  int32_t size;
  int32_t num_threads;
  float eps;
};

// Mirrors `_Rotation` in native_ops.py.
struct RotationCall {
  Bf16* heads;          // [tokens, heads, head_dim], tokens `stride` apart; changed in place
  const float* weight;  // norms' weights [heads, head_dim], or null: no norm
  const float* cos;    // [positions, head_dim / 2]
  const float* sin;
  int64_t tokens;
  int64_t stride;
  int32_t num_heads;
  int32_t head_dim;
  int32_t num_threads;
  float eps;
};

// Mirrors `_Gate` in native_ops.py.
struct GateCall {
  const Bf16* gate_up;  // [rows, 2 * size]
  Bf16* out;            // [rows, size]
  int64_t rows;
  int32_t size;
  int32_t num_threads;
  int32_t gate;
};

inline float inverse_rms(const Bf16* x, int size, float eps) {
  Vec squares{};
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vec v = load(x + i);
    squares += v * v;
  }
  if (i < size) {
    const Vec v = load_some(x + i, size - i);
    squares += v * v;
  }
  return 1.0f / std::sqrt(sum(squares) / (float)size + eps);
}

inline void normalize_row(const Bf16* x, const float* weight, int size, float eps, Bf16* out) {
  const float scale = inverse_rms(x, size, eps);
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  if (i < size)
    store_some(out + i, load_some(x + i, size - i) * scale * load_some(weight + i, size - i),
               size - i);
}

// out = add + the normed row, rounded once.
inline void add_normalized_row(const Bf16* x, const float* weight, int size, float eps,
                               const Bf16* add, Bf16* out) {
  const float scale = inverse_rms(x, size, eps);
  int i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store(out + i, load(add + i) + load(x + i) * scale * load(weight + i));
  if (const int count = size - i; count > 0) {
    const Vec y = load_some(x + i, count) * scale * load_some(weight + i, count);
    store_some(out + i, load_some(add + i, count) + y, count);
  }
}

inline void scale_row(const Bf16* x, float scale, int size, Bf16* out) {
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, load(x + i) * scale);
  if (i < size) store_some(out + i, load_some(x + i, size - i) * scale, size - i);
}

inline void rotate_head(Bf16* head, const float* weight, const float* cos, const float* sin,
                        int half, float scale) {
  for (int i = 0; i < half; i += kLanes) {
    const int count = half - i < kLanes ? half - i : kLanes;
    const bool whole = count == kLanes;
    Vec a = whole ? load(head + i) : load_some(head + i, count);
    Vec b = whole ? load(head + half + i) : load_some(head + half + i, count);
    if (weight != nullptr) {
      a = a * scale * (whole ? load(weight + i) : load_some(weight + i, count));
      b = b * scale * (whole ? load(weight + half + i) : load_some(weight + half + i, count));
    }
    const Vec c = whole ? load(cos + i) : load_some(cos + i, count);
    const Vec s = whole ? load(sin + i) : load_some(sin + i, count);
    // Written one after the other, because this order decides which product is fused with an
    // addition.
    const Vec ac = a * c, bs = b * s, bc = b * c, as = a * s;
    const Vec first = ac - bs, second = bc + as;
    if (whole) {
      store(head + i, first);
      store(head + half + i, second);
    } else {
      store_some(head + i, first, count);
      store_some(head + half + i, second, count);
    }
  }
}

// `at` is the index of the token's cos and sin.
inline void rotate_token(const RotationCall& call, int64_t token, int64_t at) {
  const int half = call.head_dim / 2;
  for (int h = 0; h < call.num_heads; ++h) {
    Bf16* head = call.heads + token * call.stride + (int64_t)h * call.head_dim;
    const float* weight = call.weight == nullptr ? nullptr : call.weight + h * call.head_dim;
    const float scale = weight == nullptr ? 1.0f : inverse_rms(head, call.head_dim, call.eps);
    rotate_head(head, weight, call.cos + at * half, call.sin + at * half, half, scale);
  }
}

// y / (1 + exp(-x)), by the exponential that cannot overflow.
inline Vec times_sigmoid(Vec y, Vec x) {
  const IntVec positive = x > Vec{};
  const Vec e = exp2_bounded<false>(select(positive, -x, x) * 1.44269504f);
  return y * select(positive, splat(1.0f), e) / (e + 1.0f);
}

// The activation times the gated half.
template <Gate kGate>
inline Vec gated(Vec gate, Vec up) {
  if constexpr (kGate == kTanhGelu)  // (1 + tanh(z)) / 2 is the sigmoid of 2 z
    return times_sigmoid(gate, (gate * gate * 0.044715f + 1.0f) * gate * 1.59576912f) * up;
  if constexpr (kGate == kClampedSwiglu) {  // as in engine/layers/ops.py
    const Vec limit = splat(7.0f);
    const Vec low = select(gate > limit, limit, gate);  // NaN stays NaN
    const Vec middle = select(up > limit, limit, select(up < -limit, -limit, up));
    return times_sigmoid(low, low * 1.702f) * (middle + 1.0f);
  }
  return times_sigmoid(gate, gate) * up;
}

template <Gate kGate>
void gate_row_by(const Bf16* gate, const Bf16* up, int size, Bf16* out) {
  int i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store(out + i, gated<kGate>(load(gate + i), load(up + i)));
  if (const int count = size - i; count > 0)
    store_some(out + i, gated<kGate>(load_some(gate + i, count), load_some(up + i, count)), count);
}

inline void gate_row(int32_t kind, const Bf16* gate, const Bf16* up, int size, Bf16* out) {
  if (kind == kTanhGelu) gate_row_by<kTanhGelu>(gate, up, size, out);
  else if (kind == kClampedSwiglu) gate_row_by<kClampedSwiglu>(gate, up, size, out);
  else gate_row_by<kSilu>(gate, up, size, out);
}

}  // namespace baton
