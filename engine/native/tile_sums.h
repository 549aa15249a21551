// Sums of tiles in a linear layer: one tile of rows and four of outputs, or two and two.

#pragma once

#include "page_turns.h"
#include "tile_sides.h"

#if defined(__AMX_BF16__)

namespace baton {

// Lines to prefetch into the second cache, evenly spread over other work.
struct Coming {
  const char* at;
  int bytes;        // each time
  int64_t left;     // in all

  static Coming none() { return {nullptr, 0, 0}; }

  BATON_INLINE void ask() {
    if (left <= 0) return;
    for (int b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 0, kForSecondCache);
    at += bytes;
    left -= bytes;
  }
};

// Prefetches a part of a tile into the first cache.
template <int kPart, int kParts>
BATON_INLINE inline void ask_part(const char* tile) {
  constexpr int kBytes = kTileBytes / kParts;
  for (int b = 0; b < kBytes; b += 64) __builtin_prefetch(tile + kPart * kBytes + b);
}

// One of the four products of a step, for one tile of rows and 64 outputs.
template <int kProduct>
BATON_INLINE inline void multiply_wide(const char* left, const RightTiles& right) {
  constexpr int kRight = 6 + kProduct % 2;
  if constexpr (kProduct == 0) tile_load<4>(left, 64);
  tile_load<kRight>(right.at + kProduct / 2 * right.half_bytes + kProduct % 2 * right.tile_bytes,
                    right.row_bytes);
  tile_multiply<kProduct, 4, kRight>();
}

// The same for two tiles of rows and two of outputs, which were copied. The left sides of the next
// step are prefetched: a tile is loaded line by line, and each line would wait for the second
// cache.
template <int kProduct>
BATON_INLINE inline void multiply_square(const char* first, const char* second, const char* right) {
  ask_part<kProduct % 2, 2>((kProduct < 2 ? first : second) + kTileBytes);
  if constexpr (kProduct < 2) tile_load<6 + kProduct>(right + kProduct * kTileBytes, 64);
  if constexpr (kProduct == 0) tile_load<4>(first, 64);
  if constexpr (kProduct == 2) tile_load<5>(second, 64);
  tile_multiply<kProduct, 4 + kProduct / 2, 6 + kProduct % 2>();
}

// Sums of one tile of rows and 64 outputs, over some steps, each of which begins with ask().
template <class Ask>
inline void sum_wide(const char* left, RightTiles right, int steps, const Ask& ask) {
  for (int step = 0; step < steps; ++step) {
    ask();
    for_sums(4, [&](auto product) BATON_INLINE { multiply_wide<product>(left, right); });
    left += kTileBytes;
    right.at += right.step_bytes;
  }
}

// Sums of two tiles of rows and half of the outputs. Tiles that were copied are in the second
// cache, so the next step's are prefetched, too.
inline void sum_square(const char* first, const char* second, const char* right, int steps,
                       Coming& asked) {
  for (int step = 0; step < steps; ++step) {
    asked.ask();
    for_sums(4, [&](auto product) BATON_INLINE {
      ask_part<product, 4>(right + 2 * kTileBytes);
      ask_part<product, 4>(right + 3 * kTileBytes);
      multiply_square<product>(first, second, right);
    });
    first += kTileBytes;
    second += kTileBytes;
    right += 2 * kTileBytes;
  }
}

BATON_INLINE inline void zero_sums() {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
}

// Writes to rows of 64 sums.
BATON_INLINE inline void store_wide(float* sums) {
  tile_store<0>(sums, kPanelOutputs * 4);
  tile_store<1>(sums + 16, kPanelOutputs * 4);
  tile_store<2>(sums + 32, kPanelOutputs * 4);
  tile_store<3>(sums + 48, kPanelOutputs * 4);
}

BATON_INLINE inline void store_square(float* sums) {
  float* second = sums + kTileRows * kPanelOutputs;
  tile_store<0>(sums, kPanelOutputs * 4);
  tile_store<1>(sums + 16, kPanelOutputs * 4);
  tile_store<2>(second, kPanelOutputs * 4);
  tile_store<3>(second + 16, kPanelOutputs * 4);
}

BATON_INLINE inline void load_square(const float* sums) {
  const float* second = sums + kTileRows * kPanelOutputs;
  tile_load<0>(sums, kPanelOutputs * 4);
  tile_load<1>(sums + 16, kPanelOutputs * 4);
  tile_load<2>(second, kPanelOutputs * 4);
  tile_load<3>(second + 16, kPanelOutputs * 4);
}

}  // namespace baton

#endif
