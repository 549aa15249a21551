// The words that products of tiles are made of: one fp32 number each, or, on CPUs with AVX-512, two
// bf16 numbers, which are multiplied by dot products or by fused multiply-adds.

#pragma once

#include <type_traits>

#include "simd.h"

namespace baton {

// One fp32 number per lane.
struct FloatWord {
  using Type = float;
  static constexpr int kPerWord = 1;
  static constexpr bool kIsPairs = false;
  static constexpr int depth(int numbers) { return numbers; }  // of a product over `numbers`
  static Vec broadcast(Type x) { return splat(x); }
  static Vec multiply_add(Vec sum, Vec a, Vec b) { return sum + a * b; }
};

#if defined(BATON_PAIRS)
inline Vec even_of(Vec pairs) { return (Vec)_mm512_slli_epi32((Bits)pairs, 16); }
inline Vec odd_of(Vec pairs) {
  return (Vec)_mm512_and_si512((Bits)pairs, _mm512_set1_epi32((int)0xffff0000));
}
inline Vec fused(Vec a, Vec b, Vec sum) {
  return (Vec)_mm512_fmadd_ps((Floats)a, (Floats)b, (Floats)sum);
}

// Two bf16 numbers per lane, whose products are summed in fp32, in one pass or in two: a left side
// has as many of Type for each pair, a right side as many parts. What is not normal counts as zero. Both
// ways give the same bits (Intel 64 and IA-32 Architectures Software Developer's Manual, VDPBF16PS: the
// product of the odd numbers first, each product fused with its sum).
#if defined(__AVX512BF16__)
struct PairWord {
  using Type = int32_t;
  static constexpr int kPerWord = 2;
  static constexpr int kPasses = 1;
  static constexpr bool kIsPairs = true;
  static constexpr int depth(int numbers) { return (numbers + 1) / 2; }
  static Vec broadcast(Type x) { return (Vec)_mm512_set1_epi32(x); }
  static Vec multiply_add(Vec sum, Vec a, Vec b) {
    return (Vec)_mm512_dpbf16_ps((Floats)sum, (__m512bh)a, (__m512bh)b);
  }
  template <int kPass>
  static Vec part(Vec pairs) {
    return pairs;
  }
};
#else
// A bf16 number as fp32. The odd number of each pair comes first.
struct HalfPair {
  float number;
};

struct PairWord {
  using Type = HalfPair;
  static constexpr int kPerWord = 1;
  static constexpr int kPasses = 2;
  static constexpr bool kIsPairs = true;
  static constexpr int depth(int numbers) { return (numbers + 1) / 2 * 2; }
  static Vec broadcast(Type x) { return splat(x.number); }
  static Vec multiply_add(Vec sum, Vec a, Vec b) { return fused(a, b, sum); }
  template <int kPass>
  static Vec part(Vec pairs) {
    return kPass == 0 ? odd_of(pairs) : even_of(pairs);
  }
};
#endif

using PairType = PairWord::Type;

// Calls action(pass) with the constants of the passes.
template <class Action>
BATON_INLINE inline void for_passes(const Action& action) {
  action(std::integral_constant<int, 0>());
  if constexpr (PairWord::kPasses == 2) action(std::integral_constant<int, 1>());
}

// The parts of a word's pairs, `stride` vectors apart.
BATON_INLINE inline void store_parts(Vec pairs, Vec* to, int stride) {
  for_passes([&](auto pass) BATON_INLINE { to[pass * stride] = PairWord::part<pass>(pairs); });
}
#endif

// C [rows, columns * 16] (+)= A [rows, depth] * B [depth, columns * 16], for one kind of word.
template <class Word, int R, int C>
inline void multiply_block(const typename Word::Type* a, int a_stride, const Vec* b, int b_stride,
                           float* c, int c_stride, int depth, bool accumulate, Ahead ahead) {
  const unsigned asked = ahead.in_steps(depth);
  Vec sums[R][C];
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < C; ++j)
      sums[i][j] = accumulate ? load(c + i * c_stride + j * kLanes) : Vec{};
  for (int d = 0; d < depth; ++d) {
    ahead.ask(asked);
    Vec right[C];
    for (int j = 0; j < C; ++j) right[j] = b[(size_t)d * b_stride + j];
    for (int i = 0; i < R; ++i) {
      const Vec left = Word::broadcast(a[i * a_stride + d]);
      for (int j = 0; j < C; ++j) sums[i][j] = Word::multiply_add(sums[i][j], left, right[j]);
    }
  }
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < C; ++j) store(c + i * c_stride + j * kLanes, sums[i][j]);
}

template <class Word, int R>
inline void multiply_rows(const typename Word::Type* a, int a_stride, const Vec* b, int b_stride,
                          float* c, int c_stride, int columns, int depth, bool accumulate,
                          Ahead ahead) {
  int j = 0;
  for (; j + kMaxColumns <= columns; j += kMaxColumns, ahead = Ahead())
    multiply_block<Word, R, kMaxColumns>(a, a_stride, b + j, b_stride, c + j * kLanes, c_stride,
                                         depth, accumulate, ahead);
  for (; kMaxColumns > 2 && j + 2 <= columns; j += 2, ahead = Ahead())
    multiply_block<Word, R, 2>(a, a_stride, b + j, b_stride, c + j * kLanes, c_stride, depth,
                               accumulate, ahead);
  for (; j < columns; ++j, ahead = Ahead())
    multiply_block<Word, R, 1>(a, a_stride, b + j, b_stride, c + j * kLanes, c_stride, depth,
                               accumulate, ahead);
}

// Only the first `columns` of b, whose rows are `b_stride` vectors apart. The first block of rows
// and columns prefetches the lines of `ahead`.
template <class Word>
inline void multiply(const typename Word::Type* a, int a_stride, const Vec* b, int b_stride,
                     float* c, int c_stride, int rows, int columns, int depth, bool accumulate,
                     Ahead ahead) {
  int i = 0;
  for (; i + kMaxRows <= rows; i += kMaxRows, ahead = Ahead())
    multiply_rows<Word, kMaxRows>(a + (size_t)i * a_stride, a_stride, b, b_stride,
                                  c + (size_t)i * c_stride, c_stride, columns, depth, accumulate,
                                  ahead);
  a += (size_t)i * a_stride;
  c += (size_t)i * c_stride;
  switch (rows - i) {
#define BATON_ROWS(n)                                                                     \
  case n:                                                                                 \
    multiply_rows<Word, n>(a, a_stride, b, b_stride, c, c_stride, columns, depth,         \
                           accumulate, ahead);                                            \
    break;
    BATON_ROWS(1)
#if defined(BATON_PAIRS)
    BATON_ROWS(2)
    BATON_ROWS(3)
    BATON_ROWS(4)
    BATON_ROWS(5)
#endif
#undef BATON_ROWS
    default:
      break;
  }
}

}  // namespace baton
