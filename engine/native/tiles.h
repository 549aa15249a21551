// Registers of sixteen rows, as AMX multiplies them: a word of 32 bits is two bf16 numbers, and
// sums [rows, 16] grow by left [rows, words] times right [words, 16].
//
// A product sums the even and the odd numbers of its words separately and adds the two. A row's sum
// is one chain of such products, and does not depend on the other rows in them.

#pragma once

#include <type_traits>

#include "tile_instructions.h"

#if defined(__AMX_BF16__)

namespace baton {

constexpr int kTileRows = 16;
constexpr int kTileWords = 16;  // of a product, at most

// Shapes of the eight registers: 0 to 3 are sums here, 4 and 5 left sides, 6 and 7 right ones. They
// are plain numbers, because they are compared before most products, and a whole that was just
// written byte by byte is slow to read.
struct TileShapes {
  int first = 0;   // rows of sums 0 and 1 and of left 4
  int second = 0;  // of sums 2 and 3 and of left 5
  int last_words = kTileWords;  // of left 5 and right 7; right 6 has all

  static TileShapes of_two(int first, int second) { return {first, second, kTileWords}; }

  // Shapes in which all sums have `rows` rows; products of left 4 and right 6 take 16 words, those
  // of 5 and 7 take eight.
  static TileShapes of_one(int rows) { return {rows, rows, kTileWords / 2}; }
};

// The registers of a thread, for as long as this lives.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles() {
    if (shapes_.first != 0) tile_release();
  }

  // Sums are lost if the shapes change.
  BATON_INLINE void shape(const TileShapes& shapes) {
    if (shapes.first != shapes_.first || shapes.second != shapes_.second ||
        shapes.last_words != shapes_.last_words)
      set(shapes);
  }

 private:
  TileShapes shapes_;

  __attribute__((noinline)) void set(const TileShapes& shapes) {
    shapes_ = shapes;
    const int rows[8] = {shapes.first,  shapes.first, shapes.second, shapes.second,
                         shapes.first,  shapes.second, kTileWords,   shapes.last_words};
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = (uint8_t)rows[i];
      config.row_bytes[i] = 64;
    }
    config.row_bytes[5] = (uint16_t)(shapes.last_words * 4);
    tile_configure(config);
  }
};

// Calls action(i) with the constants from 0 to `count` - 1, at most four: one for each sum.
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
