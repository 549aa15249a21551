// The library's entry points, plain C: each takes one call's arguments as a structure.

#include <omp.h>

#include "attention.h"
#include "block_linear.h"
#include "elementwise.h"
#include "experts.h"
#include "int8_linear.h"
#include "largest.h"
#include "linear.h"
#include "plan.h"
#include "step.h"

using namespace baton;

namespace {

// Waking a thread costs microseconds, so one thread is faster for a few rows.
constexpr int64_t kAlone = 1 << 14;  // elements

int threads_for(int num_threads, int64_t elements) { return elements < kAlone ? 1 : num_threads; }

}  // namespace

#define BATON_EXPORT __attribute__((visibility("default")))

extern "C" {

BATON_EXPORT void baton_attention(const AttentionCall* call) {
#if defined(BATON_PAIRS)
  if (call->is_bf16 && call->spans != nullptr) return attend<Bf16, Split, Bf16Word>(*call);
#endif
  if (call->is_bf16)
    call->is_fp8 ? attend<Bf16, Fp8, Bf16Word>(*call) : attend<Bf16, Bf16, Bf16Word>(*call);
  else
    call->is_fp8 ? attend<float, Fp8, FloatWord>(*call) : attend<float, float, FloatWord>(*call);
}

BATON_EXPORT void baton_plan(PlanCall* call) { plan_attention(*call); }

BATON_EXPORT void baton_rms_norm(const NormCall* call) {
  const int threads = threads_for(call->num_threads, call->rows * call->size);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < call->rows; ++row) {
    const int64_t at = row * call->size;
    const Bf16* x = call->x + at;
    if (call->add == nullptr)
      normalize_row(x, call->weight, call->size, call->eps, call->out + at);
    else
      add_normalized_row(x, call->weight, call->size, call->eps, call->add + at, call->out + at);
  }
}

BATON_EXPORT void baton_rotate(const RotationCall* call) {
  const int64_t elements = call->tokens * call->num_heads * call->head_dim;
  const int threads = threads_for(call->num_threads, elements);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t token = 0; token < call->tokens; ++token) rotate_token(*call, token, token);
}

BATON_EXPORT void baton_gate(const GateCall* call) {
  const int threads = threads_for(call->num_threads, call->rows * call->size);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < call->rows; ++row) {
    const Bf16* gate = call->gate_up + 2 * row * call->size;
    gate_row(call->gate, gate, gate + call->size, call->size, call->out + row * call->size);
  }
}

BATON_EXPORT void baton_largest(const LargestCall* call) {
  const int threads = threads_for(call->num_threads, call->rows * call->size);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < call->rows; ++row) find_largest(*call, row);
}

// Whether this build has the products that follow.
BATON_EXPORT int baton_has_linear() {
#if defined(BATON_PAIRS)
  return 1;
#else
  return 0;
#endif
}

#if defined(BATON_PAIRS)
// Packs `weight` [outputs, inputs] into `panels`, see LinearWeight.
BATON_EXPORT void baton_pack(const Bf16* weight, int32_t inputs, int32_t outputs, int32_t* panels) {
  const int count = (outputs + kPanelOutputs - 1) / kPanelOutputs;
#pragma omp parallel for schedule(static)
  for (int panel = 0; panel < count; ++panel) pack_panel(weight, inputs, outputs, panel, panels);
}

// See `plan_narrow`.
BATON_EXPORT void baton_plan_narrow(const Bf16* weight, int32_t inputs, int32_t outputs,
                                    int32_t* lowest, int32_t* begins) {
  plan_narrow(weight, inputs, outputs, lowest, begins);
}

// Packs `weight` into panels of 12 bits, by the plan that `to` refers to.
BATON_EXPORT void baton_pack_narrow(const Bf16* weight, const LinearWeight* to) {
  const int count = num_panels(*to), words = to->inputs / 2;
#pragma omp parallel
  {
    Arena arena, is_plain;
    arena.reserve((size_t)words * kPlainBytes);
    is_plain.reserve((size_t)words);
#pragma omp for schedule(static)
    for (int panel = 0; panel < count; ++panel)
      pack_narrow(weight, *to, panel, (int32_t*)arena.data(), is_plain.data());
  }
}

// Packs rows of a file's blocks, in `order`, into the panels of a part.
BATON_EXPORT void baton_pack_blocks(const FileRows* rows, const int64_t* order, int32_t outputs,
                                    const BlockPart* part) {
  pack_part(*rows, order, outputs, *part);
}

// Writes the values of a packed part, [outputs, inputs].
BATON_EXPORT void baton_block_values(const BlockPart* part, int32_t inputs, int32_t outputs,
                                     float* to) {
  part_values(*part, inputs, outputs, to);
}

// The bytes of a panel with this many inputs.
BATON_EXPORT int64_t baton_block_panel_bytes(int32_t kind, int32_t inputs) {
  int64_t bytes = 0;
  with_format(kind, [&](auto format) { bytes = format.panel_bytes(inputs); });
  return bytes;
}

// Writes the values of a file's rows `ids` [count] in bf16, [count, inputs].
BATON_EXPORT void baton_block_rows(const FileRows* rows, const int64_t* ids, int64_t count,
                                   Bf16* to) {
  const int threads = count < 8 ? 1 : omp_get_max_threads();
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < count; ++i) row_values(*rows, ids[i], to + i * rows->inputs);
}

// Whether this build and CPU multiply integers by inputs of 8 bits.
BATON_EXPORT int baton_has_int8() {
#if defined(BATON_INT8)
  return has_int8();
#else
  return 0;
#endif
}

// Whether they do so with these weights.
BATON_EXPORT int baton_takes_int8(const LinearWeight* weight) {
#if defined(BATON_INT8)
  return takes_int8(*weight);
#else
  return weight == nullptr;
#endif
}

BATON_EXPORT void baton_linear(const LinearCall* call) {
#pragma omp parallel num_threads(call->num_threads)
  linear(*call);
}

BATON_EXPORT void baton_experts(const ExpertsCall* call) {
#pragma omp parallel num_threads(call->num_threads)
  run_experts(*call);
}

BATON_EXPORT void baton_layers(const ForwardCall* call) {
#pragma omp parallel num_threads(call->num_threads)
  run_layers(*call);
}

BATON_EXPORT void baton_step(const StepCall* call) { run_step(*call); }
#endif
}
