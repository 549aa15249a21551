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

// Outputs of the panels from `first` to `end`, within a parallel region, by all of its threads; ends
// with their barrier.
void linear_part(const LinearCall& call, int first, int end);

inline void linear(const LinearCall& call) { linear_part(call, 0, num_panels(call.weight)); }

}  // namespace baton

#endif
