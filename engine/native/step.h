// A whole step in one call, from token ids to the likeliest next token of each sequence. Between
// two steps the caches are full of weights, so that the work of Python and torch there would take
// several times as long as in a loop of its own. Logits that nobody else wants are not written.

#pragma once

#include "file_blocks.h"
#include "forward.h"

#if defined(BATON_PAIRS)

namespace baton {

// Mirrors `_Step` in fused_step.py.
struct StepCall {
  ForwardCall forward;       // its `x` is working memory
  LinearWeight lm_head;
  const Bf16* embed;         // [own tokens, hidden]; null: `embed_blocks`
  const int64_t* token_ids;  // [tokens], all of them in the vocabulary
  const float* final_norm;   // [hidden]
  Largest* largest;          // [wanted, panels of the vocabulary], working memory
  float* values;             // [wanted]: the largest logit, NaN where there is one
  int64_t* places;           // [wanted]: the first own token that has it
  int64_t first_token;       // of the rank's own tokens
  int64_t num_tokens;        // of them; of one rank all of the vocabulary
  FileRows embed_blocks;
  float embedding_scale;
};

inline void look_up(const StepCall& call, int hidden) {
#pragma omp for schedule(static)
  for (int64_t token = 0; token < call.forward.tokens; ++token) {
    Bf16* row = call.forward.x + token * hidden;
    const int64_t place = call.token_ids[token] - call.first_token;
    if (place < 0 || place >= call.num_tokens)
      std::memset(row, 0, hidden * sizeof(Bf16));
    else if (call.embed == nullptr)
      row_values(call.embed_blocks, place, row);
    else
      std::memcpy(row, call.embed + place * hidden, hidden * sizeof(Bf16));
    if (call.embedding_scale != 1.0f) scale_row(row, call.embedding_scale, hidden, row);
  }
}

inline void choose(const StepCall& call, int64_t row) {
  const int panels = num_panels(call.lm_head);
  const Largest* largest = call.largest + row * panels;
  int best = 0;
  for (int panel = 0; panel < panels && !std::isnan(largest[best].value); ++panel)
    if (std::isnan(largest[panel].value) || largest[panel].value > largest[best].value)
      best = panel;
  call.values[row] = largest[best].value;
  call.places[row] = (int64_t)best * kPanelOutputs + largest[best].place;
}

inline void run_step(const StepCall& call) {
  const ForwardCall& forward = call.forward;
  const int threads = forward.num_threads;
#pragma omp parallel num_threads(threads)
  {
    look_up(call, call.lm_head.inputs);
    sum_parts(forward, forward.x, call.lm_head.inputs, forward.tokens);
    run_layers(forward);
    normalize(forward, call.final_norm, call.lm_head.inputs, forward.num_wanted);
    linear({call.lm_head, forward.normed, nullptr, nullptr, nullptr, forward.num_wanted, threads,
            call.largest});
#pragma omp for schedule(static)
    for (int64_t row = 0; row < forward.num_wanted; ++row) choose(call, row);
  }
}

}  // namespace baton

#endif
