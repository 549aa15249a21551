// Linear layers where the CPU has AMX: a panel's words are right sides of tiles as they lie, 16 bits
// a number; of fewer bits they are unpacked into the core's own caches first, for all rows to come.

#pragma once

#include "integer_panels.h"
#include "linear_call.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

namespace baton {

constexpr int kTileBytes = kTileRows * 64;
constexpr int kStreamAhead = 6144;  // bytes from what is read of a panel to what is asked for
constexpr int kComingBytes = 512;   // of the next panel, with each step of many rows
constexpr int kMostPanels = 4;      // that are kept together
constexpr int kCopyBytes = 800 << 10;
constexpr int kItemsPerThread = 4;
constexpr int kRowsByThread = 2 * kTileRows;  // so many are packed by each thread for itself

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

  // From a row that begins a tile.
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

// Words of a panel as right sides: of each half of its outputs, of each step two tiles.
struct RightTiles {
  const char* at;
  int row_bytes;
  int tile_bytes;      // from a tile of 16 outputs to the next
  int step_bytes;
  int64_t half_bytes;

  // Where the panel itself is read.
  static RightTiles in_place(const char* at) {
    return {at, kPlainBytes, 64, kTileWords * kPlainBytes, 128};
  }
  static RightTiles copied(const char* at, int steps) {
    return {at, 64, kTileBytes, 2 * kTileBytes, (int64_t)steps * 2 * kTileBytes};
  }

  // Where vector j of word w belongs.
  BATON_INLINE char* place(int w, int j) const {
    return (char*)at + j / 2 * half_bytes + w / kTileWords * step_bytes + j % 2 * tile_bytes +
           w % kTileWords * row_bytes;
  }
};

// Lines that are asked for evenly on the way of something else, for the first cache or the second.
template <bool kFirst>
struct Asked {
  const char* at;
  int bytes;        // each time
  int64_t left;     // in all

  static Asked none() { return {nullptr, 0, 0}; }

  BATON_INLINE void ask() {
    if (left <= 0) return;
    for (int b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 0, kFirst ? 3 : 2);
    at += bytes;
    left -= bytes;
  }
};
using Streamed = Asked<true>;
using Coming = Asked<false>;

// Sums of one tile of rows and 64 outputs, over some steps.
template <bool kFirst>
inline void sum_wide(const char* left, const RightTiles& right, int steps, Asked<kFirst>& asked) {
  const char* low = right.at;
  const char* high = low + right.half_bytes;
  for (int step = 0; step < steps; ++step) {
    asked.ask();
    tile_load<4>(left, 64);
    tile_load<6>(low, right.row_bytes);
    tile_multiply<0, 4, 6>();
    tile_load<7>(low + right.tile_bytes, right.row_bytes);
    tile_multiply<1, 4, 7>();
    tile_load<6>(high, right.row_bytes);
    tile_multiply<2, 4, 6>();
    tile_load<7>(high + right.tile_bytes, right.row_bytes);
    tile_multiply<3, 4, 7>();
    left += kTileBytes;
    low += right.step_bytes;
    high += right.step_bytes;
  }
}

// Sums of two tiles of rows and half of the outputs; of tiles that were copied.
inline void sum_square(const char* first, const char* second, const char* right, int steps,
                       Coming& asked) {
  for (int step = 0; step < steps; ++step) {
    asked.ask();
    tile_load<6>(right, 64);
    tile_load<4>(first, 64);
    tile_multiply<0, 4, 6>();
    tile_load<7>(right + kTileBytes, 64);
    tile_multiply<1, 4, 7>();
    tile_load<5>(second, 64);
    tile_multiply<2, 5, 6>();
    tile_multiply<3, 5, 7>();
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

// Copies or unpacks `words` words of a panel, with zeros up to a whole step: vector j of word w to
// at(w, j). Calls multiply(step) for the steps in order, when later ones have been written: a tile that
// is read right after it was written waits.
template <class Panel, class At, class Multiply>
BATON_INLINE inline void copy_words(Panel panel, int words, Streamed asked, const At& at,
                                    const Multiply& multiply) {
  constexpr int kBehind = 2;
  const int steps = (words + kTileWords - 1) / kTileWords;
  for_words(panel, words, [&](int w, const Vec* vectors) BATON_INLINE {
    if (w % kTileWords == 0 && w >= kBehind * kTileWords) multiply(w / kTileWords - kBehind);
    asked.ask();
    for (int j = 0; j < kPanelColumns; ++j) *(Vec*)at(w, j) = vectors[j];
  });
  for (int w = words; w < steps * kTileWords; ++w)
    for (int j = 0; j < kPanelColumns; ++j) *(Vec*)at(w, j) = Vec{};
  for (int step = steps > kBehind ? steps - kBehind : 0; step < steps; ++step) multiply(step);
}

// Of words of `word_bytes` bytes, those that come next.
template <class Panel>
Streamed streamed_from(const Panel& panel, int words, int word_bytes) {
  return {panel.at + kStreamAhead, word_bytes, (int64_t)words * word_bytes};
}

// One tile of rows, which streams its panel from memory.
template <bool kNarrow>
inline void few_tiled_rows(const LinearCall& call, const Item& item, int panel,
                           const LeftTiles& left, Tiles& tiles, float* sums) {
  constexpr int kSlots = 4, kBytes = kTileWords * kPlainBytes;  // of a step
  const int words = call.weight.inputs / 2;
  const char* x = left.at(item.first_row);
  const auto from = panel_from<kNarrow>(call.weight, panel, 0);
  tiles.shape(TileShapes::of_two(item.rows, item.rows));
  zero_sums();
  if (!kNarrow && words % kTileWords == 0) {
    Streamed asked{from.at + kBytes + kStreamAhead, kBytes, (int64_t)words * kPlainBytes};
    sum_wide(x, RightTiles::in_place(from.at), left.steps(), asked);
  } else {
    alignas(64) char slots[kSlots * kBytes];
    const auto at = [&](int w, int j) BATON_INLINE {
      return slots + w / kTileWords % kSlots * kBytes + j * kTileBytes + w % kTileWords * 64;
    };
    copy_words(from, words, streamed_from(from, words, kNarrow ? kNarrowBytes : kPlainBytes), at,
               [&](int step) BATON_INLINE {
                 Streamed none = Streamed::none();
                 sum_wide(x + step * kTileBytes,
                          RightTiles::copied(slots + step % kSlots * kBytes, 1), 1, none);
               });
  }
  store_wide(sums);
  finish_rows(call, sums, item.first_row, item.rows, panel);
}

// Copies of some neighbouring panels that a thread has made last within a call.
class PanelCopies {
 public:
  // Where the one of `panel` is, or is to be written; the panels from `first` on are kept together.
  char* at(int first, int panel, int64_t bytes) {
    static thread_local Arena arena;
    arena.reserve((size_t)(kMostPanels * bytes));
    if (first != first_) made_ = 0;
    first_ = first;
    place_ = panel - first;
    return arena.data() + place_ * bytes;
  }
  bool has() const { return (made_ >> place_ & 1) != 0; }
  void made() { made_ |= 1u << place_; }

 private:
  int first_ = -1;
  int place_ = 0;
  unsigned made_ = 0;
};

// More rows: the panel is copied or unpacked once for all that come one after the other, by twos of
// tiles. The first ones multiply half of it on the way, and ask for the next panel during the rest.
template <bool kNarrow>
inline void many_tiled_rows(const LinearCall& call, const Item& item, int panel,
                            const LeftTiles& left, PanelCopies& copies, Tiles& tiles,
                            float* sums) {
  constexpr int kBytes = kNarrow ? kNarrowBytes : kPlainBytes;
  const LinearWeight& weight = call.weight;
  const int words = weight.inputs / 2, steps = left.steps();
  char* copy = copies.at(item.panel, panel, (int64_t)steps * kTileWords * kPlainBytes);
  const RightTiles right = RightTiles::copied(copy, steps);
  const auto at = [&](int w, int j) BATON_INLINE { return right.place(w, j); };
  Coming next = Coming::none();
  for (int row = 0; row < item.rows; row += 2 * kTileRows) {
    const int rows = item.rows - row < 2 * kTileRows ? item.rows - row : 2 * kTileRows;
    const char* x = left.at(item.first_row + row);
    if (rows <= kTileRows) {
      tiles.shape(TileShapes::of_two(rows, rows));
      zero_sums();
      sum_wide(x, right, steps, next);
      store_wide(sums);
    } else {
      const char* second = x + steps * kTileBytes;
      tiles.shape(TileShapes::of_two(kTileRows, rows - kTileRows));
      for (int half = 0; half < 2; ++half) {
        zero_sums();
        if (copies.has()) {
          sum_square(x, second, copy + half * right.half_bytes, steps, next);
        } else {
          const auto from = panel_from<kNarrow>(weight, panel, 0);
          copy_words(from, words, streamed_from(from, words, kBytes), at,
                     [&](int step) BATON_INLINE {
                       sum_square(x + step * kTileBytes, second + step * kTileBytes,
                                  copy + step * right.step_bytes, 1, next);
                     });
          copies.made();
          next = {word_at(weight, panel, words), kComingBytes, (int64_t)words * kBytes};
        }
        store_square(sums + half * kPanelOutputs / 2);
      }
    }
    finish_rows(call, sums, item.first_row + row, rows, panel);
  }
}

// Some rows of one panel of integers: a group is unpacked once, its sums are scaled on top of those
// before.
template <class Panel>
inline void tiled_quantized_item(const LinearCall& call, const Item& item, int panel,
                                 const LeftTiles& left, Tiles& tiles, float* sums) {
  constexpr int kSteps = kGroupWords / kTileWords;
  alignas(64) char unpacked[kGroupWords * kPlainBytes];
  alignas(64) float products[kTileRows * kPanelOutputs];
  const int groups = call.weight.inputs / (2 * kGroupWords);
  const char* from = panel_at(call.weight, panel);
  const float* scales = call.weight.scales + (int64_t)panel * groups * kPanelOutputs;
  const RightTiles right = RightTiles::copied(unpacked, kSteps);
  std::memset(sums, 0, (size_t)item.rows * kPanelOutputs * 4);
  for (int group = 0; group < groups; ++group, scales += kPanelOutputs) {
    const Panel packed{from + (int64_t)group * kGroupWords * Panel::kWordBytes};
    copy_words(packed, kGroupWords, streamed_from(packed, kGroupWords, Panel::kWordBytes),
               [&](int w, int j) BATON_INLINE { return right.place(w, j); },
               [](int) BATON_INLINE {});
    for (int row = 0; row < item.rows; row += kTileRows) {
      const int rows = item.rows - row < kTileRows ? item.rows - row : kTileRows;
      Coming none = Coming::none();
      tiles.shape(TileShapes::of_two(rows, rows));
      zero_sums();
      sum_wide(left.at(item.first_row + row) + group * kSteps * kTileBytes,
               right, kSteps, none);
      store_wide(products);
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < kPanelColumns; ++j) {
          float* to = sums + (row + i) * kPanelOutputs + j * kLanes;
          store(to, load(to) + load(products + i * kPanelOutputs + j * kLanes) *
                                   load(scales + j * kLanes));
        }
    }
  }
  finish_rows(call, sums, item.first_row, item.rows, panel);
}

// One thread's part of a call.
class TiledWorker {
 public:
  static constexpr int kRowsTogether = 2 * kTileRows;  // they share what is loaded of a panel

  explicit TiledWorker(const LinearCall& call) { left_.pack(call); }

  // Panels of an item: as many as leave its rows of x and their copies in the second cache, and each
  // thread some items. Rows that come with one panel after the other would be read anew for each.
  static int panels_together(const LinearCall& call, int64_t panels, int64_t chunks) {
    if (chunks == 1) return 1;
    const int64_t fit = kCopyBytes / ((int64_t)call.weight.inputs * kPanelOutputs * 2);
    const int64_t fair = panels * chunks / (kItemsPerThread * call.num_threads);
    const int64_t most = fit < kMostPanels ? fit : kMostPanels;
    const int64_t count = fair < most ? fair : most;
    return count < 1 ? 1 : (int)count;
  }

  void work(const LinearCall& call, const Item& item) {
    alignas(64) float sums[kRowsPerItem * kPanelOutputs];
    for (int panel = item.panel; panel < item.end_panel; ++panel) {
      switch (call.weight.bits) {
        case 16:
          multiply<false>(call, item, panel, sums);
          break;
        case 12:
          ask_for_plan(call.weight, panel);
          multiply<true>(call, item, panel, sums);
          break;
        case 8:
          tiled_quantized_item<Int8Panel>(call, item, panel, left_, tiles_, sums);
          break;
        default:
          tiled_quantized_item<Int4Panel>(call, item, panel, left_, tiles_, sums);
      }
    }
  }

 private:
  LeftTiles left_;
  PanelCopies copies_;
  Tiles tiles_;

  template <bool kNarrow>
  void multiply(const LinearCall& call, const Item& item, int panel, float* sums) {
    if (item.rows <= kTileRows) few_tiled_rows<kNarrow>(call, item, panel, left_, tiles_, sums);
    else many_tiled_rows<kNarrow>(call, item, panel, left_, copies_, tiles_, sums);
  }
};

}  // namespace baton

#endif
