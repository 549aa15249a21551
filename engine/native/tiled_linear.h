// Linear layers where the CPU has AMX: a panel's words are right sides of tiles as they lie, 16 bits
// a number; of fewer bits they are unpacked into the core's own caches first, for all rows to come.

#pragma once

#include "integer_panels.h"
#include "linear_call.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

namespace baton {

constexpr int kStepBytes = kTileWords * kPlainBytes;

// Rows of x, as left sides: whole steps of 16 words, and a last one padded with zeros where the words
// are no whole steps.
class LeftRows {
 public:
  LeftRows(const Bf16* x, int inputs, int rows) : x_((const char*)x), bytes_((int64_t)inputs * 2) {
    const int words = inputs / 2, left = words % kTileWords;
    steps_ = words / kTileWords;
    if (left == 0) return;
    static thread_local Arena arena;
    arena.reserve((size_t)rows * 64);
    tail_ = arena.data();
    for (int row = 0; row < rows; ++row) {
      std::memset(tail_ + row * 64, 0, 64);
      std::memcpy(tail_ + row * 64, x_ + row * bytes_ + steps_ * 64, (size_t)left * 4);
    }
  }

  // Calls multiply(x, row_bytes, step, steps) with where the row `row` lies of some steps.
  template <class Multiply>
  void for_steps(int row, int first, int end, const Multiply& multiply) const {
    const int stop = end < steps_ ? end : steps_;
    if (first < stop) multiply(x_ + row * bytes_ + first * 64, bytes_, first, stop - first);
    if (end > steps_) multiply(tail_ + row * 64, 64, steps_, 1);
  }

 private:
  const char* x_;
  int64_t bytes_;  // of a row
  int steps_;      // whole ones
  char* tail_ = nullptr;
};

// Lines that are asked for evenly over some steps, for the second cache.
struct Asked {
  const char* at;
  int bytes;  // with each step

  BATON_INLINE void ask() {
    for (int b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 0, 2);
    at += bytes;
  }
};

// Sums of one tile of rows and 64 outputs, over some steps of a panel.
inline void sum_wide(const char* x, int64_t row_bytes, const char* panel, int steps,
                          Asked& asked) {
  for (int step = 0; step < steps; ++step, x += 64, panel += kStepBytes) {
    asked.ask();
    tile_load<4>(x, row_bytes);
    tile_load<6>(panel, kPlainBytes);
    tile_multiply<0, 4, 6>();
    tile_load<7>(panel + 64, kPlainBytes);
    tile_multiply<1, 4, 7>();
    tile_load<6>(panel + 128, kPlainBytes);
    tile_multiply<2, 4, 6>();
    tile_load<7>(panel + 192, kPlainBytes);
    tile_multiply<3, 4, 7>();
  }
}

// Sums of two tiles of rows and 32 outputs.
inline void sum_square(const char* x, int64_t row_bytes, const char* panel, int steps,
                            Asked& asked) {
  for (int step = 0; step < steps; ++step, x += 64, panel += kStepBytes) {
    asked.ask();
    tile_load<6>(panel, kPlainBytes);
    tile_load<4>(x, row_bytes);
    tile_multiply<0, 4, 6>();
    tile_load<7>(panel + 64, kPlainBytes);
    tile_multiply<1, 4, 7>();
    tile_load<5>(x + kTileRows * row_bytes, row_bytes);
    tile_multiply<2, 5, 6>();
    tile_multiply<3, 5, 7>();
  }
}

BATON_INLINE inline void zero_sums() {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
}

// To rows of 64.
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

// `words` words of a panel to `to`, with zeros up to a whole step.
template <class Panel>
inline void unpack_words(Panel panel, int words, char* to, Asked asked) {
  panel.for_words(words, [&](int w, const Vec* vectors) BATON_INLINE {
    asked.ask();
    for (int j = 0; j < kPanelColumns; ++j) *(Vec*)(to + w * kPlainBytes + 64 * j) = vectors[j];
  });
  const int whole = (words + kTileWords - 1) / kTileWords * kTileWords;
  std::memset(to + words * kPlainBytes, 0, (size_t)(whole - words) * kPlainBytes);
}

// One tile of rows, which streams its panel from memory, in pieces where it must be unpacked.
template <bool kNarrow>
inline void few_tiled_rows(const LinearCall& call, const Item& item, Tiles& tiles, float* sums) {
  alignas(64) char piece[kWordsPerPiece * kPlainBytes];
  const LinearWeight& weight = call.weight;
  const int words = weight.inputs / 2;
  const LeftRows left(call.x + item.first_row * weight.inputs, weight.inputs, item.rows);
  const bool in_place = !kNarrow && words % kTileWords == 0;
  tiles.shape(item.rows, item.rows);
  zero_sums();
  for (int w = 0; w < words; w += kWordsPerPiece) {
    const int count = words - w < kWordsPerPiece ? words - w : kWordsPerPiece;
    const int first = w / kTileWords, end = (w + count + kTileWords - 1) / kTileWords;
    const auto from = panel_from<kNarrow>(weight, item.panel, w);
    Asked asked{from.at + kPrefetchBytes, 0};
    if (in_place) {
      asked = {from.at + 4 * kStepBytes, kStepBytes};
    } else {
      constexpr int kBytes = kNarrow ? kNarrowBytes : kPlainBytes;
      unpack_words(from, count, piece, {from.at + kPrefetchBytes, kBytes});
    }
    const char* panel = in_place ? from.at : piece;
    left.for_steps(0, first, end, [&](const char* x, int64_t row_bytes, int step, int steps) {
      sum_wide(x, row_bytes, panel + (step - first) * kStepBytes, steps, asked);
    });
  }
  store_wide(sums);
  finish_rows(call, sums, item.first_row, item.rows, item.panel);
}

// More rows than a tile has: by twos of tiles. The first ones ask for the next panel.
template <bool kNarrow>
inline void many_tiled_rows(const LinearCall& call, const Item& item, Unpacked& unpacked,
                            Tiles& tiles, float* sums) {
  constexpr int kBytes = kNarrow ? kNarrowBytes : kPlainBytes;
  const LinearWeight& weight = call.weight;
  const int words = weight.inputs / 2, steps = (words + kTileWords - 1) / kTileWords;
  const LeftRows left(call.x + item.first_row * weight.inputs, weight.inputs, item.rows);
  const auto from = panel_from<kNarrow>(weight, item.panel, 0);
  const char* next = word_at(weight, item.panel, words);
  const char* panel = from.at;
  int asked_bytes = item.chunk == 0 ? kTileWords * kBytes / 2 : 0;  // with each of the first steps
  if (kNarrow || words % kTileWords != 0) {
    char* copy = unpacked.at(item.panel, 0, steps * kTileWords);
    if (!unpacked.has()) {
      unpack_words(from, words, copy, {next, kBytes / 2});
      next += (int64_t)words * kBytes / 2;
      asked_bytes /= 2;
    }
    panel = copy;
  }
  Asked asked{next, asked_bytes};
  for (int row = 0; row < item.rows; row += 2 * kTileRows, asked.bytes = 0) {
    const int rows = item.rows - row < 2 * kTileRows ? item.rows - row : 2 * kTileRows;
    if (rows <= kTileRows) {
      tiles.shape(rows, rows);
      zero_sums();
      left.for_steps(row, 0, steps, [&](const char* x, int64_t row_bytes, int step, int n) {
        sum_wide(x, row_bytes, panel + step * kStepBytes, n, asked);
      });
      store_wide(sums);
    } else {
      tiles.shape(kTileRows, rows - kTileRows);
      for (int half = 0; half < 2; ++half) {
        zero_sums();
        left.for_steps(row, 0, steps, [&](const char* x, int64_t row_bytes, int step, int n) {
          sum_square(x, row_bytes, panel + step * kStepBytes + half * 128, n, asked);
        });
        store_square(sums + half * kPanelOutputs / 2);
      }
    }
    finish_rows(call, sums, item.first_row + row, rows, item.panel);
  }
}

// Some rows of one panel of integers: a group is unpacked once, its sums are scaled on top of those
// before.
template <class Panel>
inline void tiled_quantized_item(const LinearCall& call, const Item& item, Tiles& tiles,
                                 float* sums) {
  alignas(64) char unpacked[kGroupWords * kPlainBytes];
  alignas(64) float products[kTileRows * kPanelOutputs];
  const int inputs = call.weight.inputs, groups = inputs / (2 * kGroupWords);
  const char* from = panel_at(call.weight, item.panel);
  const float* scales = call.weight.scales + (int64_t)item.panel * groups * kPanelOutputs;
  const char* x = (const char*)(call.x + item.first_row * inputs);
  std::memset(sums, 0, (size_t)item.rows * kPanelOutputs * 4);
  for (int group = 0; group < groups; ++group, scales += kPanelOutputs) {
    const Panel packed{from + (int64_t)group * kGroupWords * Panel::kWordBytes};
    for (int w = 0; w < kGroupWords; ++w) {
      packed.read(w, (Vec*)(unpacked + kPlainBytes * w));
      for (int b = 0; b < Panel::kWordBytes; b += 64)
        __builtin_prefetch(packed.at + w * Panel::kWordBytes + b + kPrefetchBytes);
    }
    for (int row = 0; row < item.rows; row += kTileRows) {
      const int rows = item.rows - row < kTileRows ? item.rows - row : kTileRows;
      Asked none{nullptr, 0};
      tiles.shape(rows, rows);
      zero_sums();
      sum_wide(x + ((int64_t)row * inputs + group * 2 * kGroupWords) * 2, (int64_t)inputs * 2,
                    unpacked, kGroupWords / kTileWords, none);
      store_wide(products);
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < kPanelColumns; ++j) {
          float* to = sums + (row + i) * kPanelOutputs + j * kLanes;
          store(to, load(to) + load(products + i * kPanelOutputs + j * kLanes) *
                                   load(scales + j * kLanes));
        }
    }
  }
  finish_rows(call, sums, item.first_row, item.rows, item.panel);
}

// One thread's part of a call.
class TiledWorker {
 public:
  static constexpr int kRowsTogether = 2 * kTileRows;  // they share what is loaded of a panel

  void work(const LinearCall& call, const Item& item) {
    alignas(64) float sums[kRowsPerItem * kPanelOutputs];
    switch (call.weight.bits) {
      case 16:
        return multiply<false>(call, item, sums);
      case 12:
        ask_for_plan(call.weight, item.panel);
        return multiply<true>(call, item, sums);
      case 8:
        return tiled_quantized_item<Int8Panel>(call, item, tiles_, sums);
      default:
        return tiled_quantized_item<Int4Panel>(call, item, tiles_, sums);
    }
  }

 private:
  Unpacked unpacked_;
  Tiles tiles_;

  template <bool kNarrow>
  void multiply(const LinearCall& call, const Item& item, float* sums) {
    if (item.rows <= kTileRows) few_tiled_rows<kNarrow>(call, item, tiles_, sums);
    else many_tiled_rows<kNarrow>(call, item, unpacked_, tiles_, sums);
  }
};

}  // namespace baton

#endif
