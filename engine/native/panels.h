// The weight of a linear layer, and how it is packed: panels of 64 outputs.

#pragma once

#include "narrow.h"

#if defined(__AVX512BF16__)

namespace baton {

constexpr int kPanelOutputs = 64;
constexpr int kPanelColumns = kPanelOutputs / kLanes;

// Mirrors `Weight` in native_linear.py. A word is a pair of inputs; bf16 words have 32 bits each
// and lie in order, or 24 (see narrow.h); of 8 bits, 64 words are 128 bytes in order; of 4 bits, 64 words are 64 bytes:
// nibble j of the 16-bit lane l is half l % 2 of word 16 j + l / 2, plus 8.
struct LinearWeight {
  const void* panels;     // [outputs / 64, inputs / 2, 64 words]
  const float* scales;    // [outputs / 64, inputs / 64, 64]; null: bf16
  const Bf16* bias;       // [outputs], or null
  const int32_t* lowest;  // of 12 bits: [outputs / 64], see narrow.h
  const int32_t* begins;  // [outputs / 64 + 1], of the panels' corrections
  const Correction* corrections;
  int32_t inputs;         // even; whole groups where there are scales
  int32_t outputs;
  int32_t bits;           // of a weight: 16, 12, 8 or 4
};

inline int64_t panel_bytes(const LinearWeight& weight) {
  return (int64_t)weight.inputs * kPanelOutputs * weight.bits / 8;
}

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

// Of each panel of `weight` the exponents that twelve bits say, and where its corrections begin.
inline void plan_narrow(const Bf16* weight, int inputs, int outputs, int32_t* lowest,
                        int32_t* begins) {
  const int panels = (outputs + kPanelOutputs - 1) / kPanelOutputs;
#pragma omp parallel for schedule(static)
  for (int panel = 0; panel < panels; ++panel) {
    const int first = panel * kPanelOutputs;
    const int here = outputs - first < kPanelOutputs ? outputs - first : kPanelOutputs;
    int64_t others;
    lowest[panel] = lowest_exponent(weight + (int64_t)first * inputs, (int64_t)here * inputs, &others);
    begins[panel + 1] = (int32_t)others;
  }
  begins[0] = 0;
  for (int panel = 0; panel < panels; ++panel) begins[panel + 1] += begins[panel];
}

// One panel by that plan; `words` [inputs / 2, 64] is working memory.
inline void pack_narrow(const Bf16* weight, int inputs, int outputs, int panel, int lowest,
                        int32_t* words, char* to, Correction* corrections) {
  pack_panel(weight, inputs, outputs, panel, words - (int64_t)panel * inputs / 2 * kPanelOutputs);
  for (int w = 0; w < inputs / 2; ++w)
    narrow_word((const uint16_t*)(words + (int64_t)w * kPanelOutputs), lowest,
                (uint16_t*)(to + (int64_t)w * NarrowPanel::kWordBytes));
  const int first = panel * kPanelOutputs;
  for (int i = 0; i < kPanelOutputs && first + i < outputs; ++i)
    for (int input = 0; input < inputs; ++input) {
      const Bf16 exact = weight[(int64_t)(first + i) * inputs + input];
      const Bf16 near{nearest_narrow(exact.bits, lowest)};
      if (near.bits != exact.bits) *corrections++ = {input, i, to_float(exact) - to_float(near)};
    }
}

}  // namespace baton

#endif
