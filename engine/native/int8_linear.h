// Linear layers of integer weights and inputs of 8 bits (VNNI): integers of a group are multiplied and
// summed exactly, then multiplied by the scales of its inputs and weights.
//
// An output adds its groups in order, in fp32: neither the number of rows nor that of threads changes a
// row's result.

#pragma once

#include "block_linear.h"
#include "int8_inputs.h"
#include "page_turns.h"

#if defined(BATON_INT8)

namespace baton {

// Whether this CPU multiplies integers fast.
bool has_int8();

// Whether these weights are integers that it multiplies fast.
bool takes_int8(const LinearWeight& weight);

// Multiplies the item's rows by a panel of integers.
void int8_rows(const LinearCall& call, const Int8Inputs& inputs, const Item& item, float* sums);

}  // namespace baton

#endif
