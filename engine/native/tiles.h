// Registers of sixteen rows, as AMX multiplies them: a word of 32 bits is two bf16 numbers, and sums
// [rows, 16] grow by left [rows, words] times right [words, 16].
//
// A product sums the even and the odd numbers of its words apart and adds the two: a sum is one chain
// of such products, and the same whatever rows it shares them with.

#pragma once

#include <type_traits>

#include "simd.h"

#if defined(__AMX_BF16__)

namespace baton {

constexpr bool kHasTiles = true;
constexpr int kTileRows = 16;
constexpr int kTileWords = 16;  // of a product, at most

// Registers 0 to 3 are sums, 4 and 5 their left sides (4 of 0 and 1, 5 of 2 and 3), 6 and 7 right.
template <int kRegister>
BATON_INLINE inline void tile_load(const void* at, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(row_bytes), "i"(kRegister) : "memory");
}

template <int kRegister>
BATON_INLINE inline void tile_store(void* at, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(row_bytes), "i"(kRegister) : "memory");
}

template <int kRegister>
BATON_INLINE inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kRegister));
}

template <int kSums, int kLeft, int kRight>
BATON_INLINE inline void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
}

// The shapes of a thread's registers, for as long as it lives.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles() {
    if (words_ != 0) asm volatile("tilerelease" ::: "memory");
  }

  // Sums 0 and 1 have `first` rows, 2 and 3 `second`, their products `words` words. Sums are lost
  // where that changes.
  void shape(int first, int second, int words = kTileWords) {
    if (first == first_ && second == second_ && words == words_) return;
    first_ = first;
    second_ = second;
    words_ = words;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    const int rows[] = {first, first, second, second, first, second, words, words};
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = (uint8_t)rows[i];
      config.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? words * 4 : 64);
    }
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }

 private:
  int first_ = 0;
  int second_ = 0;
  int words_ = 0;
};

// Calls action(i) with the constants from 0 to `count` - 1, at most `kMost`: as many sums.
template <int kMost, class Action>
BATON_INLINE inline void for_sums(int count, const Action& action) {
  action(std::integral_constant<int, 0>());
  if (count > 1) action(std::integral_constant<int, 1>());
  if constexpr (kMost == 4) {
    if (count > 2) action(std::integral_constant<int, 2>());
    if (count > 3) action(std::integral_constant<int, 3>());
  }
}

// One tile of rows, and up to four of columns.
inline void multiply_wide(Tiles& tiles, const int32_t* a, int a_stride, const Vec* b, int b_stride,
                          float* c, int c_stride, int rows, int columns, int depth, int words,
                          bool accumulate, Ahead& ahead, unsigned asked) {
  tiles.shape(rows, rows, words);
  for_sums<4>(columns, [&](auto i) BATON_INLINE {
    if (accumulate) tile_load<i>(c + i * kLanes, c_stride * 4);
    else tile_zero<i>();
  });
  for (int d = 0; d < depth; d += words) {
    ahead.ask(asked);
    tile_load<4>(a + d, a_stride * 4);
    for_sums<4>(columns, [&](auto i) BATON_INLINE {
      tile_load<6 + i % 2>(b + (size_t)d * b_stride + i, b_stride * 64);
      tile_multiply<i, 4, 6 + i % 2>();
    });
  }
  for_sums<4>(columns, [&](auto i) BATON_INLINE { tile_store<i>(c + i * kLanes, c_stride * 4); });
}

// Two tiles of rows, of which the second may have fewer, and one or two of columns.
inline void multiply_square(Tiles& tiles, const int32_t* a, int a_stride, const Vec* b, int b_stride,
                            float* c, int c_stride, int rows, int columns, int depth, int words,
                            bool accumulate, Ahead& ahead, unsigned asked) {
  tiles.shape(kTileRows, rows - kTileRows, words);
  float* second = c + (size_t)kTileRows * c_stride;
  for_sums<2>(columns, [&](auto i) BATON_INLINE {
    if (accumulate) {
      tile_load<i>(c + i * kLanes, c_stride * 4);
      tile_load<2 + i>(second + i * kLanes, c_stride * 4);
    } else {
      tile_zero<i>();
      tile_zero<2 + i>();
    }
  });
  for (int d = 0; d < depth; d += words) {
    ahead.ask(asked);
    tile_load<4>(a + d, a_stride * 4);
    tile_load<5>(a + (size_t)kTileRows * a_stride + d, a_stride * 4);
    for_sums<2>(columns, [&](auto i) BATON_INLINE {
      tile_load<6 + i>(b + (size_t)d * b_stride + i, b_stride * 64);
      tile_multiply<i, 4, 6 + i>();
      tile_multiply<2 + i, 5, 6 + i>();
    });
  }
  for_sums<2>(columns, [&](auto i) BATON_INLINE {
    tile_store<i>(c + i * kLanes, c_stride * 4);
    tile_store<2 + i>(second + i * kLanes, c_stride * 4);
  });
}

// As `multiply` in simd.h, by products of `words` words, of which `depth` is a multiple.
inline void multiply_tiles(Tiles& tiles, const int32_t* a, int a_stride, const Vec* b, int b_stride,
                           float* c, int c_stride, int rows, int columns, int depth, int words,
                           bool accumulate, Ahead ahead) {
  for (int row = 0; row < rows; row += 2 * kTileRows, ahead = Ahead()) {
    const int count = rows - row < 2 * kTileRows ? rows - row : 2 * kTileRows;
    const bool wide = count <= kTileRows;
    const int together = wide ? 4 : 2;
    const unsigned asked =
        ahead.in_steps((columns + together - 1) / together * (depth / words));
    for (int j = 0; j < columns; j += together) {
      const int n = columns - j < together ? columns - j : together;
      (wide ? multiply_wide : multiply_square)(
          tiles, a + (size_t)row * a_stride, a_stride, b + j, b_stride,
          c + (size_t)row * c_stride + j * kLanes, c_stride, count, n, depth, words, accumulate,
          ahead, asked);
    }
  }
}

}  // namespace baton

#else

namespace baton {

constexpr bool kHasTiles = false;

class Tiles {};

}  // namespace baton

#endif
