// Rows of x rounded to integers of 8 bits, for linear layers that multiply integers: each 32 inputs of
// a row share a scale.

#pragma once

#include "linear_call.h"

#if defined(BATON_INT8)

namespace baton {

constexpr int kInt8Inputs = 32;  // that share a scale
constexpr int kFour = 4;         // inputs of one product of integers

// 32 inputs of a row: x is `scale` times the code. Of each four codes the second and the third are
// swapped, because panels hold pairs, and two pairs become four bytes by putting one into the other.
struct alignas(16) Int8Block {
  int8_t codes[kInt8Inputs];
  float scale;      // NaN if an input is not finite; then all codes are zeros
  int32_t sums[2];  // of 16 codes each
  float total;      // of x, as rounded

  int32_t four(int at) const { return load_as<int32_t>(codes + kFour * at); }
};

inline Int8Block to_int8(const Bf16* x) {
  constexpr int32_t kInfinity = 0x7f800000;
  const Vec low = load(x), high = load(x + kLanes);
  const Bits mask = _mm512_set1_epi32(0x7fffffff);
  const int32_t most = _mm512_reduce_max_epi32(
      _mm512_max_epi32(_mm512_and_si512((Bits)low, mask), _mm512_and_si512((Bits)high, mask)));
  Int8Block to{};
  if (most >= kInfinity) {
    to.scale = to.total = std::numeric_limits<float>::quiet_NaN();
    return to;
  }
  const float largest = load_as<float>(&most);
  if (largest < 1e-30f) return to;
  to.scale = largest / 127;
  const Vec by = splat(127 / largest);
  const Bits first = _mm512_cvtps_epi32((Floats)(low * by));
  const Bits second = _mm512_cvtps_epi32((Floats)(high * by));
  to.sums[0] = _mm512_reduce_add_epi32(first);
  to.sums[1] = _mm512_reduce_add_epi32(second);
  to.total = to.scale * (float)(to.sums[0] + to.sums[1]);
  const __m128i swap = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  store_as(to.codes, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(first), swap));
  store_as(to.codes + kLanes, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(second), swap));
  return to;
}

class Int8Inputs {
 public:
  // Within a parallel region, by all of its threads.
  explicit Int8Inputs(const LinearCall& call) : rows_(call.rows) {
    if (!call.weight.has_int8_inputs) return;
    if (call.rows <= kRowsByThread) {
      Int8Block* own = reserve(call);
      for (int64_t row = 0; row < call.rows; ++row) convert(call, row, own);
      at_ = own;
      return;
    }
    Int8Block* shared = nullptr;
#pragma omp single copyprivate(shared)
    shared = reserve(call);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < call.rows; ++row) convert(call, row, shared);
    at_ = shared;
  }

  // Block `block` of a row; those of the next rows follow.
  const Int8Block* at(int64_t row, int block) const { return at_ + block * rows_ + row; }

 private:
  static constexpr int kRowsByThread = 8;  // up to these, each thread converts all rows for itself
  const Int8Block* at_ = nullptr;
  int64_t rows_;

  static Int8Block* reserve(const LinearCall& call) {
    static thread_local Arena arena;
    arena.reserve((size_t)(call.rows * (call.weight.inputs / kInt8Inputs)) * sizeof(Int8Block));
    return (Int8Block*)arena.data();
  }

  static void convert(const LinearCall& call, int64_t row, Int8Block* to) {
    const Bf16* x = call.x + row * call.weight.inputs;
    for (int block = 0; block < call.weight.inputs / kInt8Inputs; ++block)
      to[block * call.rows + row] = to_int8(x + block * kInt8Inputs);
  }
};

}  // namespace baton

#endif
