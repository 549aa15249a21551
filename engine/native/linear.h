// Linear layers with bf16 inputs: weights in panels of 64 outputs that a core streams from memory
// once. Weights are bf16, the same in 12 bits, or integers of 8 or 4 with a scale for each output and
// 64 inputs.
//
// An output is one chain of products over its inputs in order, in fp32, rounded once: neither the
// number of rows nor that of threads nor 12 bits change a row's result.

#pragma once

#include "linear_call.h"

#if defined(BATON_PAIRS)

namespace baton {

// Computes the outputs of the panels from `first` to `end`. All threads of a parallel region call
// it; it ends with a barrier.
void linear_part(const LinearCall& call, int first, int end);

inline void linear(const LinearCall& call) { linear_part(call, 0, num_panels(call.weight)); }

// Groups of rows, each multiplied by a weight of its own.
struct GroupedCall {
  const LinearWeight* weights;  // [groups], all of the same shape
  const int32_t* begins;        // [groups]: a multiple of kGroupAlignment
  const int32_t* counts;        // [groups]: of rows; other weights than those with rows are not read
  const Bf16* x;                // [rows, inputs]
  Bf16* out;                    // [rows, outputs]; rows of no group keep what they hold
  int64_t rows;
  int32_t groups;
  int32_t num_threads;
};

#if defined(__AMX_BF16__)
constexpr int kGroupAlignment = 16;  // rows of a tile
#else
constexpr int kGroupAlignment = 1;
#endif

// Like `linear`.
void grouped_linear(const GroupedCall& call);

}  // namespace baton

#endif
