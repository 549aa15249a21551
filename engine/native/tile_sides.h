// The operands of tile products in a linear layer: rows of x as left sides, words of a panel as
// right sides.

#pragma once

#include "linear_call.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

namespace baton {

constexpr int kTileBytes = kTileRows * 64;
constexpr int kRowsByThread = 2 * kTileRows;  // up to these, each thread packs all rows for itself

// Rows of x as left sides, tile by tile: [rows / 16, steps of 16 words, 16 rows, 16 words], zeros
// beyond the last word.
class LeftTiles {
 public:
  // Within a parallel region, by all of its threads.
  void pack(const LinearCall& call) {
    const int inputs = call.weight.inputs;
    steps_ = (inputs / 2 + kTileWords - 1) / kTileWords;
    const int64_t tiles = (call.rows + kTileRows - 1) / kTileRows;
    if (call.rows <= kRowsByThread) {
      reserve(tiles);
      for (int64_t tile = 0; tile < tiles; ++tile) pack_tile(call, tile);
      return;
    }
    char* shared = nullptr;
#pragma omp single copyprivate(shared)
    {
      reserve(tiles);
      shared = at_;
    }
    at_ = shared;
#pragma omp for schedule(static)
    for (int64_t tile = 0; tile < tiles; ++tile) pack_tile(call, tile);
  }

  int steps() const { return steps_; }

  // The left side of the tile that begins with a row.
  const char* at(int64_t row) const { return at_ + row / kTileRows * steps_ * kTileBytes; }

 private:
  char* at_ = nullptr;
  int steps_ = 0;

  void reserve(int64_t tiles) {
    static thread_local Arena arena;
    arena.reserve((size_t)tiles * steps_ * kTileBytes);
    at_ = arena.data();
  }

  void pack_tile(const LinearCall& call, int64_t tile) {
    const int inputs = call.weight.inputs, left = inputs % (2 * kTileWords);
    const int64_t first = tile * kTileRows;
    const int rows = call.rows - first < kTileRows ? (int)(call.rows - first) : kTileRows;
    char* to = at_ + tile * steps_ * kTileBytes;
    for (int i = 0; i < rows; ++i, to += 64) {
      const Bf16* from = call.x + (first + i) * inputs;
      const int whole = inputs / (2 * kTileWords);
      for (int step = 0; step < whole; ++step)
        store_as(to + step * kTileBytes, load_as<Vec>(from + step * 2 * kTileWords));
      if (left != 0) {
        const __mmask32 mask = (__mmask32)((1ull << left) - 1);
        store_as(to + whole * kTileBytes, load_pairs(mask, from + whole * 2 * kTileWords));
      }
    }
  }
};

// Words of a panel as right sides: two tiles for each step of each half of its outputs.
struct RightTiles {
  const char* at;
  int row_bytes;
  int tile_bytes;      // from a tile of 16 outputs to the next
  int step_bytes;
  int64_t half_bytes;

  // The right sides in the panel itself, not copied.
  static RightTiles in_place(const char* at) {
    return {at, kPlainBytes, 64, kTileWords * kPlainBytes, 128};
  }
  static RightTiles copied(const char* at, int steps) {
    return {at, 64, kTileBytes, 2 * kTileBytes, (int64_t)steps * 2 * kTileBytes};
  }

  // The place of vector j of word i of a step.
  BATON_INLINE char* place(int step, int i, int j) const {
    return (char*)at + j / 2 * half_bytes + step * step_bytes + j % 2 * tile_bytes + i * row_bytes;
  }
};

}  // namespace baton

#endif
