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

constexpr int kTileRows = 16;
constexpr int kTileWords = 16;  // of a product, at most

// Registers 0 to 3 are sums here, 4 and 5 left sides, 6 and 7 right ones.
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

// Shapes of the eight registers.
struct TileShapes {
  uint8_t rows[8];
  uint8_t words[8];  // of a row

  // Sums 0 and 1 of `first` rows and left 4, sums 2 and 3 of `second` and left 5.
  static TileShapes of_two(int first, int second) {
    const uint8_t a = (uint8_t)first, b = (uint8_t)second;
    return {{a, a, b, b, a, b, kTileWords, kTileWords}, {16, 16, 16, 16, 16, 16, 16, 16}};
  }

  // All sums of `rows` rows; products of left 4 and right 6 take 16 words, of 5 and 7 eight.
  static TileShapes of_one(int rows) {
    const uint8_t a = (uint8_t)rows;
    return {{a, a, a, a, a, a, kTileWords, kTileWords / 2},
            {16, 16, 16, 16, kTileWords, kTileWords / 2, 16, 16}};
  }
};

// The registers of a thread, for as long as this lives.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles() {
    if (shapes_.rows[0] != 0) asm volatile("tilerelease" ::: "memory");
  }

  // Sums are lost where the shapes change.
  void shape(const TileShapes& shapes) {
    if (std::memcmp(&shapes, &shapes_, sizeof shapes) == 0) return;
    shapes_ = shapes;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = shapes.rows[i];
      config.row_bytes[i] = (uint16_t)(shapes.words[i] * 4);
    }
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }

 private:
  TileShapes shapes_ = {};
};

// Calls action(i) with the constants from 0 to `count` - 1, at most four: as many sums.
template <class Action>
BATON_INLINE inline void for_sums(int count, const Action& action) {
  action(std::integral_constant<int, 0>());
  if (count > 1) action(std::integral_constant<int, 1>());
  if (count > 2) action(std::integral_constant<int, 2>());
  if (count > 3) action(std::integral_constant<int, 3>());
}

}  // namespace baton

#else

namespace baton {

class Tiles {};

}  // namespace baton

#endif
