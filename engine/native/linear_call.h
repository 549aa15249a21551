// What a call of a linear layer is, how it is divided, and how its sums are written.

#pragma once

#include <limits>

#include "arena.h"
#include "packing.h"
#include "panels.h"

#if defined(BATON_PAIRS)

namespace baton {

constexpr int kRowsPerItem = 96;
constexpr int kGroupWords = 32;  // 64 inputs share a scale

// The largest of some sums (NaN if one of them is), and the index of the first that equals it.
struct Largest {
  float value;
  int32_t place;
};

// Mirrors `_Call` in native_linear.py.
struct LinearCall {
  LinearWeight weight;
  const Bf16* x;     // [rows, inputs]
  const Bf16* add;   // [rows, outputs], or null; may be `out`
  Bf16* out;         // [rows, outputs], or null: then `wide`
  float* wide;       // [rows, outputs], or null: then `largest`
  int64_t rows;
  int32_t num_threads;
  Largest* largest = nullptr;  // [rows, panels]: instead of the sums of a panel
};

// Some rows of one panel: one of the `chunks` into which all rows are divided.
struct Item {
  int panel;
  int64_t first_row;
  int rows;
  int chunk;
  int chunks;
};

// Rounds 32 sums of a row once, after adding `add` if it is given.
BATON_INLINE inline void write_sums(Vec low, Vec high, const Bf16* add, Bf16* out) {
  if (add != nullptr) {
    low += load(add);
    high += load(add + kLanes);
  }
  store_as(out, to_bf16(low, high));
}

// Only the first `count` of a panel's sums, at least one and at most all.
inline Largest largest_of(const Vec* sums, int count) {
  const float least = -std::numeric_limits<float>::infinity();
  const int columns = count < kPanelOutputs ? (count + kLanes - 1) / kLanes : kPanelColumns;
  Vec known[kPanelColumns], top = splat(least);
  IntVec odd{};
  for (int j = 0; j < columns; ++j) {
    known[j] = select(lane_numbers() < count - j * kLanes, sums[j], splat(least));
    odd |= known[j] != known[j];
    top = larger(known[j], top);
  }
  const bool is_odd = any(odd);
  const float value = is_odd ? std::numeric_limits<float>::quiet_NaN() : largest(top);
  int j = 0;
  unsigned hits = 0;
  for (; hits == 0; ++j)
    hits = lanes_of(is_odd ? known[j] != known[j] : known[j] == splat(value));
  return {value, (j - 1) * kLanes + __builtin_ctz(hits)};
}

// Finishes the sums of one row and panel: adds bias and `add`, then rounds once and writes them, or
// finds the largest. It is not inlined, because the compiler makes the usual case beside it (see
// `finish_rows`) so slow that prompts take half as long again.
__attribute__((noinline)) inline void finish_row(const LinearCall& call, const float* sums,
                                                 int64_t row, int panel) {
  const int outputs = call.weight.outputs, first = panel * kPanelOutputs;
  const int64_t at = row * outputs + first;
  Vec all[kPanelColumns];
  for (int j = 0; j < kPanelColumns && first + j * kLanes < outputs; ++j) {
    const int o = j * kLanes, count = outputs - first - o;
    const bool whole = count >= kLanes;
    Vec& y = all[j] = load(sums + o);
    if (call.weight.bias != nullptr) {
      const Bf16* bias = call.weight.bias + first + o;
      y += whole ? load(bias) : load_some(bias, count);
    }
    if (call.add != nullptr)
      y += whole ? load(call.add + at + o) : load_some(call.add + at + o, count);
    if (call.out != nullptr) {
      if (whole) store(call.out + at + o, y);
      else store_some(call.out + at + o, y, count);
    } else if (call.wide != nullptr) {
      if (whole) store(call.wide + at + o, y);
      else store_some(call.wide + at + o, y, count);
    }
  }
  if (call.out == nullptr && call.wide == nullptr)
    call.largest[row * num_panels(call.weight) + panel] = largest_of(all, outputs - first);
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
