// Linear layers of quantized blocks: products of a group's codes are summed, then multiplied by its
// scale; what all codes have in common is multiplied by the sum of the group's inputs.

#pragma once

#include "block_panels.h"
#include "linear_call.h"

#if defined(BATON_PAIRS)

namespace baton {

constexpr int kSumInputs = 16;  // the smallest group

// Sums of each row's inputs, sixteen inputs each.
class InputSums {
 public:
  // Within a parallel region, by all of its threads.
  explicit InputSums(const LinearCall& call) : stride_(call.weight.inputs / kSumInputs) {
    if (call.weight.bits != 0 || call.weight.has_int8_inputs) return;
    if (call.rows <= kRowsByThread) {
      float* own = reserve(call.rows);
      for (int64_t row = 0; row < call.rows; ++row) add_up(call, row, own);
      at_ = own;
      return;
    }
    float* shared = nullptr;
#pragma omp single copyprivate(shared)
    shared = reserve(call.rows);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < call.rows; ++row) add_up(call, row, shared);
    at_ = shared;
  }

  // The sum of the inputs of a group of `inputs`.
  float of(int64_t row, int group, int inputs) const {
    const float* at = at_ + row * stride_ + group * (inputs / kSumInputs);
    return inputs == kSumInputs ? at[0] : at[0] + at[1];
  }

 private:
  static constexpr int kRowsByThread = 8;
  const float* at_ = nullptr;
  int64_t stride_;

  float* reserve(int64_t rows) const {
    static thread_local Arena arena;
    arena.reserve((size_t)(rows * stride_) * sizeof(float));
    return (float*)arena.data();
  }

  void add_up(const LinearCall& call, int64_t row, float* to) const {
    const Bf16* x = call.x + row * call.weight.inputs;
    for (int i = 0; i < stride_; ++i) to[row * stride_ + i] = sum(load(x + i * kSumInputs));
  }
};

// The part of the weight that a panel belongs to.
inline const BlockPart& part_of_panel(const LinearWeight& weight, int panel) {
  int i = weight.num_parts - 1;
  while (weight.parts[i].first > panel) --i;
  return weight.parts[i];
}

// A group's scales for 64 outputs, and the factors for the sums of its inputs.
struct GroupScales {
  alignas(64) float scales[kPanelOutputs];
  alignas(64) float sums[kPanelOutputs];

  template <class Format>
  BATON_INLINE void read(Format, const char* panel, int group, float base = Format::kBase) {
    const char* span = Format::span_at(panel, group);
    const char* at = Format::group_at(panel, group);
    for (int j = 0; j < kPanelColumns; ++j) {
      Vec scale, of_sums;
      Format::scales_of(span, at, j, base, scale, of_sums);
      store(scales + j * kLanes, scale);
      store(sums + j * kLanes, of_sums);
    }
  }
};

// Adds the products of a group and 16 outputs to `to`.
template <class Format>
BATON_INLINE inline void add_group(Format, Vec products, const GroupScales& group, int at,
                                   float input_sum, float* to) {
  Vec sums = load(to) + products * load(group.scales + at);
  if (Format::kNeedsSums) sums += splat(input_sum) * load(group.sums + at);
  store(to, sums);
}

// Packs `outputs` rows of a file into panels, beginning with the part's first.
void pack_part(const FileRows& rows, const int64_t* order, int outputs, const BlockPart& part);

// Writes the values of a part with `outputs` outputs, [outputs, inputs].
void part_values(const BlockPart& part, int inputs, int outputs, float* to);

}  // namespace baton

#endif
