// Linear layers where the CPU has AMX: a panel's words are right sides of tiles as they lie, 16 bits
// a number; of fewer bits they are unpacked into the core's own caches first, for all rows to come.

#pragma once

#include "integer_panels.h"
#include "tile_sums.h"

#if defined(__AMX_BF16__)

namespace baton {

constexpr int kStreamAhead = 6144;  // bytes from what is read of a panel to what is asked for
constexpr int kComingBytes = 512;   // of the next panel, with each step of many rows
constexpr int kMostPanels = 4;      // that are kept together
constexpr int kCopyBytes = 800 << 10;
constexpr int kItemsPerThread = 4;

// Vectors [kBegin, kEnd) of `words` words of a panel, with zeros up to a whole step: vector j of word i
// of a step to at(step, i, j). Of a step `kLag` steps before calls multiply(step, product) for its four
// products, each between some words: a tile that is read right after it was written waits. With each
// word `kLines` lines are asked for, from `ahead` on.
template <int kBegin, int kEnd, int kLag, int kLines, class Panel, class At, class Multiply>
BATON_INLINE inline void copy_words(Panel panel, int words, const char* ahead, const At& at,
                                    const Multiply& multiply) {
  constexpr int kEvery = kTileWords / 4;
  const int steps = (words + kTileWords - 1) / kTileWords;
  for (int step = 0; step < steps + kLag; ++step)
    for_sums(4, [&](auto product) BATON_INLINE {
      if (step >= kLag) multiply(step - kLag, product);
      if (step >= steps) return;
      for_sums(kEvery, [&](auto word) BATON_INLINE {
        constexpr int i = product * kEvery + word;
        Vec vectors[kPanelColumns] = {};
        if (step * kTileWords + i < words) read_next(panel, step * kTileWords + i, vectors);
        for (int line = 0; line < kLines; ++line, ahead += 64) __builtin_prefetch(ahead);
        for (int j = kBegin; j < kEnd; ++j) *(Vec*)at(step, i, j) = vectors[j];
      });
    });
}

template <bool kNarrow>
constexpr int kWordBytes = kNarrow ? kNarrowBytes : kPlainBytes;

// One tile of rows, which streams its panel from memory.
template <bool kNarrow>
inline void few_tiled_rows(const LinearCall& call, const Item& item, int panel,
                           const LeftTiles& left, Tiles& tiles, float* sums) {
  constexpr int kLag = 2, kSlots = 4, kBytes = kTileWords * kPlainBytes;  // of a step
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
    const auto slot = [&](int step) BATON_INLINE { return slots + step % kSlots * kBytes; };
    copy_words<0, kPanelColumns, kLag, kWordBytes<kNarrow> / 64>(
        from, words, from.at + kStreamAhead,
        [&](int step, int i, int j) BATON_INLINE { return slot(step) + j * kTileBytes + i * 64; },
        [&](int step, auto product) BATON_INLINE {
          multiply_wide<product>(x + step * kTileBytes, RightTiles::copied(slot(step), 1));
        });
  }
  store_wide(sums);
  finish_rows(call, sums, item.first_row, item.rows, panel);
}

// Half of the outputs of two tiles of rows, over some words.
template <int kHalf, int kLines, class Panel>
inline void sum_block(const char* first, const char* second, const Panel& from, int words,
                      const char* ahead, bool is_first, float* sums) {
  constexpr int kLag = 1, kSlots = 2, kBytes = 2 * kTileBytes, kBegin = 2 * kHalf;
  alignas(64) char slots[kSlots * kBytes];
  const auto slot = [&](int step) BATON_INLINE { return slots + step % kSlots * kBytes; };
  if (is_first) zero_sums();
  else load_square(sums);
  copy_words<kBegin, kBegin + 2, kLag, kLines>(
      from, words, ahead,
      [&](int step, int i, int j)
          BATON_INLINE { return slot(step) + (j - kBegin) * kTileBytes + i * 64; },
      [&](int step, auto product) BATON_INLINE {
        multiply_square<product>(first + step * kTileBytes, second + step * kTileBytes, slot(step));
      });
  store_square(sums);
}

// Two tiles of rows, which stream their panel from memory, too. Their sums are twice what the registers
// hold: those of one half of the outputs, then those of the other, come for a block of words that stays
// in the first cache.
template <bool kNarrow>
inline void two_tiled_rows(const LinearCall& call, const Item& item, int panel,
                           const LeftTiles& left, Tiles& tiles, float* sums) {
  constexpr int kBlockWords = 4 * kTileWords;
  constexpr int kLines = kWordBytes<kNarrow> / 64, kLow = 2;  // the second half takes longer
  const int words = call.weight.inputs / 2;
  const char* first = left.at(item.first_row);
  const char* second = first + left.steps() * kTileBytes;
  tiles.shape(TileShapes::of_two(kTileRows, item.rows - kTileRows));
  for (int w = 0; w < words; w += kBlockWords) {
    const int count = words - w < kBlockWords ? words - w : kBlockWords;
    const auto from = panel_from<kNarrow>(call.weight, panel, w);
    const char* ahead = from.at + kStreamAhead;
    sum_block<0, kLow>(first, second, from, count, ahead, w == 0, sums);
    sum_block<1, kLines - kLow>(first, second, from, count, ahead + count * kLow * 64, w == 0,
                                sums + kPanelOutputs / 2);
    first += kBlockWords / kTileWords * kTileBytes;
    second += kBlockWords / kTileWords * kTileBytes;
  }
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
  constexpr int kLag = 2, kBytes = kWordBytes<kNarrow>;
  const LinearWeight& weight = call.weight;
  const int words = weight.inputs / 2, steps = left.steps();
  char* copy = copies.at(item.panel, panel, (int64_t)steps * kTileWords * kPlainBytes);
  const RightTiles right = RightTiles::copied(copy, steps);
  const auto at = [&](int step, int i, int j) BATON_INLINE { return right.place(step, i, j); };
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
          copy_words<0, kPanelColumns, kLag, kBytes / 64>(
              from, words, from.at + kStreamAhead, at, [&](int step, auto product) BATON_INLINE {
                multiply_square<product>(x + step * kTileBytes, second + step * kTileBytes,
                                         copy + step * right.step_bytes);
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
    for_words(packed, kGroupWords, [&](int w, const Vec* vectors) BATON_INLINE {
      for (int line = 0; line < Panel::kWordBytes; line += 64)
        __builtin_prefetch(packed.at + w * Panel::kWordBytes + kStreamAhead + line);
      for (int j = 0; j < kPanelColumns; ++j)
        *(Vec*)right.place(w / kTileWords, w % kTileWords, j) = vectors[j];
    });
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
    if (item.rows <= kTileRows)
      few_tiled_rows<kNarrow>(call, item, panel, left_, tiles_, sums);
    else if (call.rows <= 2 * kTileRows)
      two_tiled_rows<kNarrow>(call, item, panel, left_, tiles_, sums);
    else
      many_tiled_rows<kNarrow>(call, item, panel, left_, copies_, tiles_, sums);
  }
};

}  // namespace baton

#endif
