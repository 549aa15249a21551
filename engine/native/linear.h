// Linear layers in bf16: weights in panels of 64 outputs that a core streams from memory once for
// a few rows, and keeps in its second cache for many.
//
// An output is one chain of dot products over its inputs in order, in fp32, rounded once: neither
// the number of rows nor that of threads changes a row's result.

#pragma once

#include "simd.h"

#if defined(__AVX512BF16__)

namespace baton {

constexpr int kPanelOutputs = 64;
constexpr int kPanelColumns = kPanelOutputs / kLanes;
constexpr int kRowsPerItem = 96;
constexpr int kWordsPerBlock = 2048;   // of one panel: 512 KiB, half of a usual second cache
constexpr int kPrefetchBytes = 1024;

// Mirrors `_Weight` in native_linear.py.
struct LinearWeight {
  const int32_t* panels;  // [outputs / 64, inputs / 2, 64]: words are the inputs 2w and 2w + 1
  const Bf16* bias;       // [outputs], or null
  int32_t inputs;         // even
  int32_t outputs;
};

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

inline int num_panels(const LinearWeight& weight) {
  return (weight.outputs + kPanelOutputs - 1) / kPanelOutputs;
}

// `weight` [outputs, inputs] into panels; outputs that fill the last panel up are zeros.
inline void pack_panel(const Bf16* weight, int inputs, int outputs, int panel, int32_t* to) {
  const int words = inputs / 2;
  alignas(64) static constexpr char kZeros[64] = {};
  to += (int64_t)panel * words * kPanelOutputs;
  for (int j = 0; j < kPanelColumns; ++j)
    for (int w = 0; w < words; w += kLanes) {
      const void* rows[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int64_t output = (int64_t)panel * kPanelOutputs + j * kLanes + i;
        rows[i] = output < outputs ? (const void*)(weight + output * inputs + 2 * w) : kZeros;
      }
      transpose_words(rows, 0, words - w < kLanes ? words - w : kLanes,
                      (Vec*)to + (int64_t)w * kPanelColumns + j, kPanelColumns);
    }
}

// R rows of x over `words` words of a panel, on top of `sums` unless they are the first. Asks for
// kLines lines from `ahead` on with each word.
template <int R, int kLines>
inline void multiply_panel(const Bf16* x, int64_t x_stride, const int32_t* panel, int words,
                           float* sums, bool is_first, const char* ahead) {
  Vec acc[R][kPanelColumns];
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < kPanelColumns; ++j)
      acc[i][j] = is_first ? Vec{} : load(sums + i * kPanelOutputs + j * kLanes);
  const char* at = (const char*)panel;
  for (int w = 0; w < words; ++w, at += 4 * kPanelOutputs) {
    Vec right[kPanelColumns];
    for (int j = 0; j < kPanelColumns; ++j) right[j] = *(const Vec*)(at + 64 * j);
    for (int j = 0; j < kLines; ++j, ahead += 64) __builtin_prefetch(ahead, 0, kLines == 4 ? 3 : 2);
    for (int i = 0; i < R; ++i) {
      const Vec left = PairWord::broadcast(load_as<int32_t>(x + i * x_stride + 2 * w));
      for (int j = 0; j < kPanelColumns; ++j)
        acc[i][j] = PairWord::multiply_add(acc[i][j], left, right[j]);
    }
  }
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < kPanelColumns; ++j)
      store(sums + i * kPanelOutputs + j * kLanes, acc[i][j]);
}

template <int kLines>
inline void multiply_some(int rows, const Bf16* x, int64_t x_stride, const int32_t* panel,
                          int words, float* sums, bool is_first, const char* ahead) {
  switch (rows) {
#define BATON_ROWS(n)                                                                     \
  case n:                                                                                 \
    multiply_panel<n, kLines>(x, x_stride, panel, words, sums, is_first, ahead);          \
    break;
    BATON_ROWS(1) BATON_ROWS(2) BATON_ROWS(3) BATON_ROWS(4) BATON_ROWS(5) BATON_ROWS(6)
#undef BATON_ROWS
    default:
      break;
  }
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

// Some rows of one panel's outputs. The inputs come in blocks, so that what the rows share of the
// panel stays cached; rows in even groups of at most six.
inline void linear_item(const LinearCall& call, int panel, int64_t first_row, int rows) {
  alignas(64) float sums[kRowsPerItem * kPanelOutputs];
  const int inputs = call.weight.inputs, words = inputs / 2;
  const int groups = (rows + kMaxRows - 1) / kMaxRows;
  const int32_t* from = call.weight.panels + (int64_t)panel * words * kPanelOutputs;
  for (int w = 0; w < words; w += kWordsPerBlock) {
    const int count = words - w < kWordsPerBlock ? words - w : kWordsPerBlock;
    const int32_t* block = from + (int64_t)w * kPanelOutputs;
    // The next block, or panel, comes into the second cache while this one is multiplied
    const char* next = (const char*)(block + (int64_t)count * kPanelOutputs);
    for (int group = 0; group < groups; ++group) {
      const int begin = rows * group / groups, end = rows * (group + 1) / groups;
      const Bf16* x = call.x + (first_row + begin) * inputs + 2 * w;
      float* to = sums + begin * kPanelOutputs;
      const bool is_first = w == 0;
      if (groups == 1)
        multiply_some<4>(end - begin, x, inputs, block, count, to, is_first,
                         (const char*)block + kPrefetchBytes);
      else if (groups <= 3 && group < 2)
        multiply_some<2>(end - begin, x, inputs, block, count, to, is_first,
                         next + (int64_t)group * count * 128);
      else if (groups > 3 && group < 4)
        multiply_some<1>(end - begin, x, inputs, block, count, to, is_first,
                         next + (int64_t)group * count * 64);
      else
        multiply_some<0>(end - begin, x, inputs, block, count, to, is_first, nullptr);
    }
  }
  for (int row = 0; row < rows; ++row)
    finish_row(call, sums + row * kPanelOutputs, first_row + row, panel);
}

// Within a parallel region, by all of its threads; ends with their barrier.
inline void linear(const LinearCall& call) {
  const int64_t panels = num_panels(call.weight);
  const int64_t chunks = (call.rows + kRowsPerItem - 1) / kRowsPerItem;
#pragma omp for schedule(guided)
  for (int64_t item = 0; item < panels * chunks; ++item) {
    const int64_t chunk = item % chunks;
    const int64_t begin = call.rows * chunk / chunks, end = call.rows * (chunk + 1) / chunks;
    linear_item(call, (int)(item / chunks), begin, (int)(end - begin));
  }
}

}  // namespace baton

#endif
