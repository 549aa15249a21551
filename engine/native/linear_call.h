// What a call of a linear layer is, how it is divided, and how its sums are written.

#pragma once

#include "arena.h"
#include "panels.h"

#if defined(__AVX512BF16__)

namespace baton {

constexpr int kRowsPerItem = 96;
constexpr int kGroupWords = 32;  // 64 inputs share a scale

// Mirrors `_Call` in native_linear.py.
struct LinearCall {
  LinearWeight weight;
  const Bf16* x;     // [rows, inputs]
  const Bf16* add;   // [rows, outputs], or null; may be `out`
  Bf16* out;         // [rows, outputs], or null: then `wide`
  float* wide;       // [rows, outputs]
  int64_t rows;
  int32_t num_threads;
};

// Some rows of some panels, the given one of `chunks` of all rows.
struct Item {
  int panel;      // the first
  int end_panel;  // past the last
  int64_t first_row;
  int rows;
  int chunk;
  int chunks;
};

// 32 sums of a row, `add` on top where given, rounded once.
BATON_INLINE inline void write_sums(Vec low, Vec high, const Bf16* add, Bf16* out) {
  if (add != nullptr) {
    low += load(add);
    high += load(add + kLanes);
  }
  store_as(out, _mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}

// Sums of one row and panel: bias and `add` on top, rounded once, written.
inline void finish_row(const LinearCall& call, const float* sums, int64_t row, int panel) {
  const int outputs = call.weight.outputs, first = panel * kPanelOutputs;
  const int64_t at = row * outputs + first;
  for (int j = 0; j < kPanelColumns && first + j * kLanes < outputs; ++j) {
    const int o = j * kLanes, count = outputs - first - o;
    const bool whole = count >= kLanes;
    Vec y = load(sums + o);
    if (call.weight.bias != nullptr) {
      const Bf16* bias = call.weight.bias + first + o;
      y += whole ? load(bias) : load_some(bias, count);
    }
    if (call.add != nullptr)
      y += whole ? load(call.add + at + o) : load_some(call.add + at + o, count);
    if (call.out == nullptr) {
      if (whole) store(call.wide + at + o, y);
      else store_some(call.wide + at + o, y, count);
    } else {
      if (whole) store(call.out + at + o, y);
      else store_some(call.out + at + o, y, count);
    }
  }
}

// The usual case: a whole panel to bf16, without bias.
inline bool is_usual(const LinearCall& call, int panel) {
  return call.out != nullptr && call.weight.bias == nullptr &&
         (panel + 1) * kPanelOutputs <= call.weight.outputs;
}

inline void finish_rows(const LinearCall& call, const float* sums, int64_t first_row, int rows,
                        int panel) {
  const bool usual = is_usual(call, panel);
  for (int64_t row = first_row; row < first_row + rows; ++row, sums += kPanelOutputs) {
    if (!usual) {
      finish_row(call, sums, row, panel);
      continue;
    }
    const int64_t at = row * call.weight.outputs + panel * kPanelOutputs;
    for (int o = 0; o < kPanelOutputs; o += 2 * kLanes)
      write_sums(load(sums + o), load(sums + o + kLanes),
                 call.add == nullptr ? nullptr : call.add + at + o, call.out + at + o);
  }
}

}  // namespace baton

#endif
