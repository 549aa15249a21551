// Linear layers on CPUs with AMX. Words of 16 bits a number are right sides of tiles without a
// copy; words of fewer bits are first unpacked into the core's own caches, for all rows to come.

#pragma once

#include "block_linear.h"
#include "page_turns.h"
#include "tile_sums.h"

#if defined(__AMX_BF16__)

namespace baton {

constexpr int kComingBytes = 512;   // of the next panel, with each step of many rows
constexpr int kBlockBytes = 800 << 10;  // of rows that stay in the second cache, beside a panel's copy
constexpr int kFewestRows = 64;         // of a thread that has rows of its own

// Unpacks a panel's next words, a quarter of the step that begins with word `begin`: write(i,
// vectors) gets word i of the step, zeros from the panel's word `words` on. With each word `kLines`
// lines are prefetched.
template <int kQuarter, int kLines, class Panel, class Write>
BATON_INLINE inline void read_quarter(Panel& panel, int begin, int words, PageTurns& stream,
                                      const Write& write) {
  constexpr int kWords = kTileWords / 4;
  for_sums(kWords, [&](auto each) BATON_INLINE {
    constexpr int i = kQuarter * kWords + each;
    Vec vectors[kPanelColumns] = {};
    if (begin + i < words) read_next(panel, begin + i, vectors);
    stream.ask(kLines);
    write(i, vectors);
  });
}

// Unpacks `words` words of a panel, with zeros up to a whole step: vector j of word i of a step
// goes to at(step, i, j). Between the words of a step it calls multiply for the four products of
// the step that is `kLag` steps earlier, because reading a tile right after writing it waits.
template <int kLag, int kLines, class Panel, class At, class Multiply>
BATON_INLINE inline void copy_words(Panel panel, int words, const At& at, const Multiply& multiply) {
  PageTurns stream(panel.at);
  const int steps = (words + kTileWords - 1) / kTileWords;
  for (int step = 0; step < steps + kLag; ++step)
    for_sums(4, [&](auto product) BATON_INLINE {
      if (step >= kLag) multiply(step - kLag, product);
      if (step >= steps) return;
      read_quarter<product, kLines>(
          panel, step * kTileWords, words, stream, [&](int i, const Vec* vectors) BATON_INLINE {
            for (int j = 0; j < kPanelColumns; ++j) *(Vec*)at(step, i, j) = vectors[j];
          });
    });
}

// Multiplies one tile of rows while it streams the panel from memory.
template <bool kNarrow>
inline void few_tiled_rows(const LinearCall& call, const Item& item, const LeftTiles& left,
                           Tiles& tiles, float* sums) {
  constexpr int kLag = 2, kSlots = 4, kBytes = kTileWords * kPlainBytes;  // of a step
  const int words = call.weight.inputs / 2;
  const char* x = left.at(item.first_row);
  const auto from = panel_from<kNarrow>(call.weight, item.panel, 0);
  tiles.shape(TileShapes::of_two(item.rows, item.rows));
  zero_sums();
  if (!kNarrow && words % kTileWords == 0) {
    PageTurns stream(from.at);
    sum_wide(x, RightTiles::in_place(from.at), left.steps(), [&] { stream.ask(kBytes / 64); });
  } else {
    alignas(64) char slots[kSlots * kBytes];
    const auto slot = [&](int step) BATON_INLINE { return slots + step % kSlots * kBytes; };
    copy_words<kLag, kWordBytes<kNarrow> / 64>(
        from, words,
        [&](int step, int i, int j) BATON_INLINE { return slot(step) + j * kTileBytes + i * 64; },
        [&](int step, auto product) BATON_INLINE {
          multiply_wide<product>(x + step * kTileBytes, RightTiles::copied(slot(step), 1));
        });
  }
  store_wide(sums);
  finish_rows(call, sums, item.first_row, item.rows, item.panel);
}

// The sums of two tiles of rows are twice what the registers hold. So the sums of one half of the
// outputs grow by a block of steps, then those of the other half; the block's words stay in the
// first cache.
class HalvesInTurn {
 public:
  // The products of two tiles of rows, `steps` steps each; `sums` [32, 64].
  HalvesInTurn(const char* first, const char* second, int steps, int block_steps, float* sums)
      : first_(first), second_(second), steps_(steps), block_steps_(block_steps), sums_(sums) {
    end_block();
  }

  // The next product, of four a step; `right` has the step's words of this half.
  template <int kProduct>
  BATON_INLINE void multiply(const char* right) {
    if (kProduct == 0 && step_ == begin_) {
      if (begin_ == 0) zero_sums();
      else load_square(sums_of_half());
    }
    const int64_t at = (int64_t)step_ * kTileBytes;
    multiply_square<kProduct>(first_ + at, second_ + at, right);
    if (kProduct == 3 && ++step_ == end_) turn();
  }

 private:
  const char* first_;
  const char* second_;
  int steps_;
  int block_steps_;
  float* sums_;
  int half_ = 0;
  int begin_ = 0;  // of the block
  int end_ = 0;
  int step_ = 0;

  float* sums_of_half() const { return sums_ + half_ * kPanelOutputs / 2; }

  void end_block() { end_ = begin_ + block_steps_ < steps_ ? begin_ + block_steps_ : steps_; }

  BATON_INLINE void turn() {
    store_square(sums_of_half());
    if (half_ == 1) {
      begin_ = end_;
      end_block();
    }
    half_ = 1 - half_;
    step_ = begin_;
  }
};

// Multiplies two tiles of rows while it streams the panel from memory. Words are unpacked for one
// half of the outputs, then for the other; products follow some steps behind, across halves and
// blocks.
template <bool kNarrow>
inline void two_tiled_rows(const LinearCall& call, const Item& item, const LeftTiles& left,
                           Tiles& tiles, float* sums) {
  constexpr int kBlockSteps = 4, kLag = 3, kSlots = 4, kBytes = 2 * kTileBytes;  // of half a step
  constexpr int kLines = kWordBytes<kNarrow> / 64, kLow = 2;  // asked for with the first half
  const int words = call.weight.inputs / 2, steps = left.steps();
  const char* first = left.at(item.first_row);
  alignas(64) char slots[kSlots * kBytes];
  const auto slot = [&](int turn) BATON_INLINE { return slots + turn % kSlots * kBytes; };
  tiles.shape(TileShapes::of_two(kTileRows, item.rows - kTileRows));
  HalvesInTurn products(first, first + steps * kTileBytes, steps, kBlockSteps, sums);
  auto panel = panel_from<kNarrow>(call.weight, item.panel, 0);
  PageTurns stream(panel.at);
  int turn = 0;  // steps of halves that were unpacked
  for (int begin = 0; begin < steps; begin += kBlockSteps) {
    const int end = begin + kBlockSteps < steps ? begin + kBlockSteps : steps;
    const auto block = panel;
    for_sums(2, [&](auto half) BATON_INLINE {
      constexpr int kBegin = 2 * half, kAsked = half == 0 ? kLow : kLines - kLow;
      panel = block;
      for (int step = begin; step < end; ++step, ++turn)
        for_sums(4, [&](auto product) BATON_INLINE {
          if (turn >= kLag) products.template multiply<product>(slot(turn - kLag));
          read_quarter<product, kAsked>(
              panel, step * kTileWords, words, stream, [&](int i, const Vec* vectors) BATON_INLINE {
                for (int j = 0; j < 2; ++j)
                  *(Vec*)(slot(turn) + j * kTileBytes + i * 64) = vectors[kBegin + j];
              });
        });
    });
  }
  for (int last = turn < kLag ? 0 : turn - kLag; last < turn; ++last)
    for_sums(4, [&](auto product)
                    BATON_INLINE { products.template multiply<product>(slot(last)); });
  finish_rows(call, sums, item.first_row, item.rows, item.panel);
}

// A copy of the panel that a thread has multiplied last within a call.
class PanelCopy {
 public:
  // The place of the copy of the panel at `panel`, which has to be written unless `is_made`.
  char* of(const char* panel, int64_t bytes) {
    static thread_local Arena arena;
    arena.reserve((size_t)bytes);
    if (panel != panel_) is_made_ = false;
    panel_ = panel;
    return arena.data();
  }
  bool is_made() const { return is_made_; }
  void made() { is_made_ = true; }

 private:
  const char* panel_ = nullptr;
  bool is_made_ = false;
};

// Multiplies more rows, two tiles at a time: the panel is copied or unpacked once for all of them.
// The first two tiles multiply half of it while it is unpacked, and the next panel is prefetched
// during the rest.
template <bool kNarrow>
inline void many_tiled_rows(const LinearCall& call, const Item& item, const LeftTiles& left,
                            PanelCopy& copied, Tiles& tiles, float* sums) {
  constexpr int kLag = 2, kBytes = kWordBytes<kNarrow>;
  const LinearWeight& weight = call.weight;
  const int words = weight.inputs / 2, steps = left.steps();
  char* copy = copied.of(panel_at(weight, item.panel), (int64_t)steps * kTileWords * kPlainBytes);
  const RightTiles right = RightTiles::copied(copy, steps);
  const auto at = [&](int step, int i, int j) BATON_INLINE { return right.place(step, i, j); };
  Coming next = Coming::none();
  for (int row = 0; row < item.rows; row += 2 * kTileRows) {
    const int rows = item.rows - row < 2 * kTileRows ? item.rows - row : 2 * kTileRows;
    const char* x = left.at(item.first_row + row);
    if (rows <= kTileRows) {
      tiles.shape(TileShapes::of_two(rows, rows));
      zero_sums();
      sum_wide(x, right, steps, [&] { next.ask(); });
      store_wide(sums);
    } else {
      const char* second = x + steps * kTileBytes;
      tiles.shape(TileShapes::of_two(kTileRows, rows - kTileRows));
      for (int half = 0; half < 2; ++half) {
        zero_sums();
        if (copied.is_made()) {
          sum_square(x, second, copy + half * right.half_bytes, steps, next);
        } else {
          const auto from = panel_from<kNarrow>(weight, item.panel, 0);
          copy_words<kLag, kBytes / 64>(
              from, words, at, [&](int step, auto product) BATON_INLINE {
                multiply_square<product>(x + step * kTileBytes, second + step * kTileBytes,
                                         copy + step * right.step_bytes);
              });
          copied.made();
          next = {word_at(weight, item.panel, words), kComingBytes, (int64_t)words * kBytes};
        }
        store_square(sums + half * kPanelOutputs / 2);
      }
    }
    finish_rows(call, sums, item.first_row + row, rows, item.panel);
  }
}

// Multiplies some rows by one panel of integers: a group is unpacked once; its sums are scaled and
// added to those before.
template <class Panel>
inline void tiled_quantized_item(const LinearCall& call, const Item& item, const LeftTiles& left,
                                 Tiles& tiles, float* sums) {
  constexpr int kSteps = kGroupWords / kTileWords;
  alignas(64) char unpacked[kGroupWords * kPlainBytes];
  alignas(64) float products[kTileRows * kPanelOutputs];
  const int groups = call.weight.inputs / (2 * kGroupWords);
  const char* from = panel_at(call.weight, item.panel);
  const float* scales = call.weight.scales + (int64_t)item.panel * groups * kPanelOutputs;
  const RightTiles right = RightTiles::copied(unpacked, kSteps);
  PageTurns stream(from);
  std::memset(sums, 0, (size_t)item.rows * kPanelOutputs * 4);
  for (int group = 0; group < groups; ++group, scales += kPanelOutputs) {
    const Panel packed{from + (int64_t)group * kGroupWords * Panel::kWordBytes};
    for_words(packed, kGroupWords, [&](int w, const Vec* vectors) BATON_INLINE {
      stream.ask(Panel::kWordBytes / 64);
      for (int j = 0; j < kPanelColumns; ++j)
        *(Vec*)right.place(w / kTileWords, w % kTileWords, j) = vectors[j];
    });
    for (int row = 0; row < item.rows; row += kTileRows) {
      const int rows = item.rows - row < kTileRows ? item.rows - row : kTileRows;
      tiles.shape(TileShapes::of_two(rows, rows));
      zero_sums();
      sum_wide(left.at(item.first_row + row) + group * kSteps * kTileBytes,
               right, kSteps, [] {});
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

// One of the four products of a group of blocks: 16 outputs and 16 words, or eight.
template <int kProduct, int kWords>
BATON_INLINE inline void multiply_group_tile(const char* left, const char* words) {
  constexpr int kLeft = kWords == kTileWords ? 4 : 5, kRight = kLeft + 2;
  if constexpr (kProduct == 0) tile_load<kLeft>(left, 64);
  tile_load<kRight>(words + kProduct * kTileBytes, 64);
  tile_multiply<kProduct, kLeft, kRight>();
}

// Multiplies some rows by one panel of blocks: a group is unpacked once; its sums are scaled and
// added to those before.
template <class Format>
inline void tiled_block_item(Format format, const LinearCall& call, const Item& item,
                             const LeftTiles& left, const InputSums& input_sums, const char* panel,
                             Tiles& tiles, float* sums) {
  alignas(64) char words[kPanelColumns * kTileBytes];
  alignas(64) float products[kTileRows * kPanelOutputs];
  const int groups = call.weight.inputs / Format::kInputs;
  constexpr int kPerTile = kTileWords / Format::kWords;  // groups of a left tile
  PageTurns stream(panel);
  GroupScales scales;
  std::memset(sums, 0, (size_t)item.rows * kPanelOutputs * 4);
  for (int group = 0; group < groups; ++group) {
    stream.ask(Format::kGroupBytes / 64 + 1);
    scales.read(format, panel, group);
    for_words(Format::words_at(Format::group_at(panel, group)), Format::kWords,
              [&](int w, const Vec* vectors) BATON_INLINE {
      for (int j = 0; j < kPanelColumns; ++j)
        *(Vec*)(words + j * kTileBytes + w * 64) = vectors[j];
    });
    for (int row = 0; row < item.rows; row += kTileRows) {
      const int rows = item.rows - row < kTileRows ? item.rows - row : kTileRows;
      const char* x = left.at(item.first_row + row) + group / kPerTile * kTileBytes +
                      group % kPerTile * Format::kWords * 4;
      tiles.shape(kPerTile == 1 ? TileShapes::of_two(rows, rows) : TileShapes::of_one(rows));
      zero_sums();
      for_sums(4, [&](auto product)
                      BATON_INLINE { multiply_group_tile<product, Format::kWords>(x, words); });
      store_wide(products);
      for (int i = 0; i < rows; ++i) {
        const float of_inputs =
            Format::kNeedsSums ? input_sums.of(item.first_row + row + i, group, Format::kInputs) : 0;
        for (int j = 0; j < kPanelColumns; ++j)
          add_group(format, load(products + i * kPanelOutputs + j * kLanes), scales, j * kLanes,
                    of_inputs, sums + (row + i) * kPanelOutputs + j * kLanes);
      }
    }
  }
  finish_rows(call, sums, item.first_row, item.rows, item.panel);
}

// One thread's part of a call.
class TiledWorker {
 public:
  static constexpr int kRowsTogether = 2 * kTileRows;  // they share what is loaded of a panel

  explicit TiledWorker(const LinearCall& call) : input_sums_(call) { left_.pack(call); }

  // The rows of one block: if there are many rows, as many as a thread has for itself and its
  // second cache holds; 0 if there are few, because then each thread has all.
  static int64_t rows_per_block(const LinearCall& call) {
    const int64_t share = (call.rows + call.num_threads - 1) / call.num_threads;
    if (share < kFewestRows) return 0;
    const int64_t fit = kBlockBytes / ((int64_t)call.weight.inputs * 2);
    const int64_t most = fit > kRowsTogether ? fit : kRowsTogether;
    const int64_t blocks = (share + most - 1) / most;
    return (share + blocks - 1) / blocks;
  }

  void work(const LinearCall& call, const Item& item) {
    alignas(64) float sums[kRowsPerItem * kPanelOutputs];
    switch (call.weight.bits) {
      case 0:
        return multiply_blocks(call, item, sums);
      case 16:
        return multiply<false>(call, item, sums);
      case 12:
        ask_for_plan(call.weight, item.panel);
        return multiply<true>(call, item, sums);
      default:
        return multiply_quantized<Int8Panel>(call, item, sums);
    }
  }

 private:
  LeftTiles left_;
  InputSums input_sums_;
  PanelCopy copied_;
  Tiles tiles_;

  template <bool kNarrow>
  void multiply(const LinearCall& call, const Item& item, float* sums) {
    if (item.rows <= kTileRows)
      few_tiled_rows<kNarrow>(call, item, left_, tiles_, sums);
    else if (call.rows <= 2 * kTileRows)
      two_tiled_rows<kNarrow>(call, item, left_, tiles_, sums);
    else
      many_tiled_rows<kNarrow>(call, item, left_, copied_, tiles_, sums);
  }

  void multiply_blocks(const LinearCall& call, const Item& item, float* sums) {
    const BlockPart& part = part_of_panel(call.weight, item.panel);
    with_format(part.kind, [&](auto format) {
      const char* panel =
          part.panels + (item.panel - part.first) * format.panel_bytes(call.weight.inputs);
      for_parts(item, [&](const Item& some) {
        tiled_block_item(format, call, some, left_, input_sums_, panel, tiles_, sums);
      });
    });
  }

  // Calls action with at most as many rows as there are sums for.
  template <class Action>
  static void for_parts(const Item& item, const Action& action) {
    for (int row = 0; row < item.rows; row += kRowsPerItem) {
      Item some = item;
      some.first_row += row;
      some.rows = item.rows - row < kRowsPerItem ? item.rows - row : kRowsPerItem;
      action(some);
    }
  }

  template <class Panel>
  void multiply_quantized(const LinearCall& call, const Item& item, float* sums) {
    for_parts(item, [&](const Item& some) {
      tiled_quantized_item<Panel>(call, some, left_, tiles_, sums);
    });
  }
};

}  // namespace baton

#endif
