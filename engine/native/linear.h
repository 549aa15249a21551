// Linear layers with bf16 inputs: weights in panels of 64 outputs that a core streams from memory
// once. Weights are bf16, the same in 12 bits, or integers of 8 or 4 with a scale for each output and
// 64 inputs.
//
// An output is one chain of products over its inputs in order, in fp32, rounded once: neither the
// number of rows nor that of threads nor 12 bits change a row's result.

#pragma once

#include "tiled_linear.h"
#include "vector_linear.h"

#if defined(__AVX512BF16__)

namespace baton {

#if defined(__AMX_BF16__)
using LinearWorker = TiledWorker;
#else
using LinearWorker = VectorWorker;
#endif

// Outputs of the panels from `first` to `end`, within a parallel region, by all of its threads; ends
// with their barrier.
inline void linear_part(const LinearCall& call, int first, int end) {
  constexpr int kTogether = LinearWorker::kRowsTogether;  // these are shared out, not rows
  const int64_t panels = end - first;
  const int64_t chunks = (call.rows + kRowsPerItem - 1) / kRowsPerItem;
  const int64_t groups = (call.rows + kTogether - 1) / kTogether;
  const int together = LinearWorker::panels_together(call, panels, chunks);
  const int64_t items = (panels + together - 1) / together * chunks;
  LinearWorker worker(call);
#pragma omp for schedule(guided)
  for (int64_t item = 0; item < items; ++item) {
    const int64_t chunk = item % chunks;
    const int64_t begin = groups * chunk / chunks * kTogether;
    const int64_t end_row = groups * (chunk + 1) / chunks * kTogether;
    const int64_t stop = end_row < call.rows ? end_row : call.rows;
    const int panel = first + (int)(item / chunks) * together;
    worker.work(call, {panel, panel + together < end ? panel + together : end, begin,
                       (int)(stop - begin), (int)chunk, (int)chunks});
  }
}

inline void linear(const LinearCall& call) { linear_part(call, 0, num_panels(call.weight)); }

}  // namespace baton

#endif
