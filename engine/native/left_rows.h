// Rows of x as left sides of pairs in a linear layer by vectors.

#pragma once

#include "linear_call.h"

#if defined(BATON_PAIRS)

namespace baton {

class LeftRows {
 public:
  // Within a parallel region, by all of its threads.
  explicit LeftRows(const LinearCall& call) : stride_(call.weight.inputs / PairWord::kPerWord) {
    if (call.weight.has_int8_inputs) return;
#if defined(__AVX512BF16__)
    at_ = (const PairType*)call.x;  // as they lie
#else
    const int64_t inputs = call.weight.inputs;
    if (call.rows <= kRowsByThread) {
      HalfPair* own = reserve(call.rows);
      pack_left(call.x, call.rows * inputs, own);
      at_ = own;
      return;
    }
    HalfPair* shared = nullptr;
#pragma omp single copyprivate(shared)
    shared = reserve(call.rows);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < call.rows; ++row)
      pack_left(call.x + row * inputs, inputs, shared + row * inputs);
    at_ = shared;
#endif
  }

  int64_t stride() const { return stride_; }

  // The row from one of its pairs on.
  const PairType* at(int64_t row, int word) const {
    return at_ + row * stride_ + word * PairWord::kPasses;
  }

 private:
  static constexpr int kRowsByThread = 8;  // up to these, each thread packs all rows for itself
  const PairType* at_;
  int64_t stride_;

  PairType* reserve(int64_t rows) const {
    static thread_local Arena arena;
    arena.reserve((size_t)(rows * stride_) * sizeof(PairType));
    return (PairType*)arena.data();
  }
};

}  // namespace baton

#endif
