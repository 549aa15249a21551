// The weight of a linear layer, and how it is packed: panels of 64 outputs.

#pragma once

#include "arena.h"
#include "narrow.h"
#include "transpose.h"

#if defined(BATON_PAIRS)

namespace baton {

constexpr int kPanelOutputs = 64;
constexpr int kPanelColumns = kPanelOutputs / kLanes;

// Of a bf16 panel.
template <bool kNarrow>
constexpr int kWordBytes = kNarrow ? kNarrowBytes : kPlainBytes;

// Some panels of quantized blocks of one kind; mirrors `_Part` in block_panels.py.
struct BlockPart {
  const char* panels;  // see block_panels.h
  int32_t first;       // panel of the weight
  int32_t kind;
};

// Mirrors `Weight` in native_linear.py. A word is a pair of inputs; bf16 words have 32 bits each
// and lie in order, or 24 (see narrow.h); of 8 bits, 64 words are 128 bytes in order.
struct LinearWeight {
  const void* panels;     // [outputs / 64, inputs / 2, 64 words]
  const float* scales;    // [outputs / 64, inputs / 64, 64]; null: bf16
  const Bf16* bias;       // [outputs], or null
  const int32_t* lowest;  // of 12 bits: [outputs / 64], the exponents
  const int32_t* begins;  // [outputs / 64 + 1], how many words before the panel are plain
  const int32_t* plain;   // which they are in their panel, each panel's with INT_MAX at the end
  const BlockPart* parts; // of quantized blocks: [num_parts], in order
  int32_t inputs;         // even; whole groups where there are scales
  int32_t outputs;
  int32_t bits;           // of a weight: 16, 12 or 8; 0: quantized blocks
  int32_t num_parts;
  int32_t has_int8_inputs;  // whether x is rounded to integers of 8 bits (int8_linear.h)
};

// The number of plain words before `first` in a panel of 12 bits.
inline int plain_before(const LinearWeight& weight, int panel, int first) {
  const int32_t* plain = weight.plain + weight.begins[panel] + panel;
  int count = 0;
  while (plain[count] < first) ++count;
  return count;
}

// Prefetches what must be known before the next panel of 12 bits can be read.
inline void ask_for_plan(const LinearWeight& weight, int panel) {
  __builtin_prefetch(weight.plain + weight.begins[panel + 1] + panel + 1);
  __builtin_prefetch(weight.begins + panel + kLanes);
  __builtin_prefetch(weight.lowest + panel + kLanes);
}

// Where a panel begins.
inline const char* panel_at(const LinearWeight& weight, int panel) {
  const int64_t plain = weight.bits == 12 ? weight.begins[panel] : 0;
  return (const char*)weight.panels +
         (int64_t)panel * weight.inputs * kPanelOutputs * weight.bits / 8 +
         plain * (kPlainBytes - kNarrowBytes);
}

// Where a word of a bf16 panel lies, or what follows the last one.
inline const char* word_at(const LinearWeight& weight, int panel, int word) {
  const char* begin = panel_at(weight, panel);
  if (weight.bits == 16) return begin + (int64_t)word * kPlainBytes;
  return begin + (int64_t)word * kNarrowBytes +
         plain_before(weight, panel, word) * (kPlainBytes - kNarrowBytes);
}

// Calls action(w, vectors) for the first `words` words of a panel, in order.
template <class Panel, class Action>
BATON_INLINE inline void for_words(const Panel& panel, int words, const Action& action) {
  for (int w = 0; w < words; ++w) {
    Vec vectors[kPanelColumns];
    panel.read(w, vectors);
    action(w, vectors);
  }
}

// 16 bits a number.
struct PlainPanel {
  const char* at;
  BATON_INLINE void read(int w, Vec* to) const {
    for (int j = 0; j < kPanelColumns; ++j) to[j] = *(const Vec*)(at + w * kPlainBytes + 64 * j);
  }
};

// The same for a panel of 12 bits, whose words differ in size.
template <class Action>
BATON_INLINE inline void for_words(const NarrowPanel& panel, int words, const Action& action) {
  panel.for_words(words, action);
}

// Word w of a panel whose words are read in order.
template <class Panel>
BATON_INLINE inline void read_next(Panel& panel, int w, Vec* to) {
  panel.read(w, to);
}

BATON_INLINE inline void read_next(NarrowPanel& panel, int w, Vec* to) { panel.read_next(w, to); }

// A bf16 panel from word `first` on.
template <bool kNarrow>
inline auto panel_from(const LinearWeight& weight, int panel, int first) {
  const char* at = word_at(weight, panel, first);
  if constexpr (kNarrow)
    return NarrowPanel{at, upper_table(weight.lowest[panel] / 2),
                       weight.plain + weight.begins[panel] + panel +
                           plain_before(weight, panel, first),
                       first};
  else
    return PlainPanel{at};
}

inline int num_panels(const LinearWeight& weight) {
  return (weight.outputs + kPanelOutputs - 1) / kPanelOutputs;
}

// Packs `weight` [outputs, inputs] into panels; outputs that fill the last panel up are zeros.
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

// Finds, for each panel of `weight`, the sixteen exponents that 12 bits can express and the number
// of plain words before it.
inline void plan_narrow(const Bf16* weight, int inputs, int outputs, int32_t* lowest,
                        int32_t* begins) {
  const int panels = (outputs + kPanelOutputs - 1) / kPanelOutputs;
#pragma omp parallel
  {
    Arena is_plain;
    is_plain.reserve((size_t)inputs / 2);
#pragma omp for schedule(static)
    for (int panel = 0; panel < panels; ++panel) {
      const int first = panel * kPanelOutputs;
      const int here = outputs - first < kPanelOutputs ? outputs - first : kPanelOutputs;
      const Bf16* rows = weight + (int64_t)first * inputs;
      lowest[panel] = lowest_exponent(rows, (int64_t)here * inputs);
      begins[panel + 1] = mark_plain(rows, inputs, here, lowest[panel], is_plain.data());
    }
  }
  begins[0] = 0;
  for (int panel = 0; panel < panels; ++panel) begins[panel + 1] += begins[panel];
}

// Packs one panel by that plan. `words` [inputs / 2, 64] and `is_plain` [inputs / 2] are working
// memory.
inline void pack_narrow(const Bf16* weight, const LinearWeight& to, int panel, int32_t* words,
                        char* is_plain) {
  const int first = panel * kPanelOutputs, inputs = to.inputs;
  const int here = to.outputs - first < kPanelOutputs ? to.outputs - first : kPanelOutputs;
  const Bf16* rows = weight + (int64_t)first * inputs;
  mark_plain(rows, inputs, here, to.lowest[panel], is_plain);
  pack_panel(rows, inputs, here, 0, words);
  int32_t* plain = (int32_t*)to.plain + to.begins[panel] + panel;
  char* at = (char*)panel_at(to, panel);
  for (int w = 0; w < inputs / 2; ++w, words += kPanelOutputs)
    if (is_plain[w]) {
      std::memcpy(at, words, kPlainBytes);
      at += kPlainBytes;
      *plain++ = w;
    } else {
      narrow_word((const char*)words, at);
      at += kNarrowBytes;
    }
  *plain = INT_MAX;
}

}  // namespace baton

#endif
