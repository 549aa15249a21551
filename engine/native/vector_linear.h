// Linear layers by vectors of sixteen dot products: a panel is streamed once where its rows fit the
// registers. Where a few more come a core keeps a piece of the panel in its first cache until they all
// have passed over it; where many come, the panel in its second cache.

#pragma once

#include <utility>

#include "integer_panels.h"
#include "linear_call.h"

#if defined(__AVX512BF16__)

namespace baton {

constexpr int kGroupsByPiece = 6;      // of rows; more of them are bound by arithmetic
constexpr int kGroupsToUnpack = 5;     // of 12 bits, so many share what the first one unpacks
constexpr int kWordsPerPiece = 64;     // of one panel: 16 KiB, a third of a usual first cache
constexpr int kWordsPerBlock = 2048;   // 512 KiB, half of a usual second cache
constexpr int kPrefetchBytes = 1024;

// Calls action(i, j) for every i < Rows and j < Columns, both constants. Plain loops over an array of
// accumulators leave it to the compiler's mood whether that becomes registers; GCC kept it in memory,
// and stored all of it with every prefetch.
template <int Columns, class Action, int... At>
BATON_INLINE inline void for_each_of(std::integer_sequence<int, At...>, const Action& action) {
  (action(std::integral_constant<int, At / Columns>{},
          std::integral_constant<int, At % Columns>{}), ...);
}

template <int Rows, int Columns, class Action>
BATON_INLINE inline void for_each(const Action& action) {
  for_each_of<Columns>(std::make_integer_sequence<int, Rows * Columns>{}, action);
}

// Where sums of some rows and one panel go.
struct Sums {
  float* kept;      // [rows, 64]: those of words before, and, where more words follow, of these
  bool is_first;    // there are none before
  Bf16* out;        // the last words': where they are rounded to, rows `stride` apart; null: kept
  const Bf16* add;  // on top of these; or null
  int64_t stride;
};

// R rows of x over `words` words of a panel. Asks for kLines lines from `ahead` on with each word, the
// next word's `step` bytes on.
template <int R, int kLines, class Panel>
inline void multiply_panel(const Bf16* x, int64_t x_stride, Panel panel, int words,
                           const Sums& sums, const char* ahead, int step) {
  Vec acc[R][kPanelColumns];
  for_each<R, kPanelColumns>([&](auto i, auto j) BATON_INLINE {
    acc[i][j] = sums.is_first ? Vec{} : load(sums.kept + i * kPanelOutputs + j * kLanes);
  });
  for_words(panel, words, [&](int w, const Vec* right) BATON_INLINE {
    for (int j = 0; j < kLines; ++j) __builtin_prefetch(ahead + 64 * j);
    ahead += step;
    for_each<R, kPanelColumns>([&](auto i, auto j) BATON_INLINE {
      const Vec left = PairWord::broadcast(load_as<int32_t>(x + i * x_stride + 2 * w));
      acc[i][j] = PairWord::multiply_add(acc[i][j], left, right[j]);
    });
  });
  if (sums.out == nullptr)
    return for_each<R, kPanelColumns>([&](auto i, auto j) BATON_INLINE {
      store(sums.kept + i * kPanelOutputs + j * kLanes, acc[i][j]);
    });
  for_each<R, kPanelColumns / 2>([&](auto i, auto half) BATON_INLINE {
    const int64_t at = i * sums.stride + 2 * half * kLanes;
    write_sums(acc[i][2 * half], acc[i][2 * half + 1],
               sums.add == nullptr ? nullptr : sums.add + at, sums.out + at);
  });
}

template <int kLines, class Panel>
inline void multiply_some(int rows, const Bf16* x, int64_t x_stride, Panel panel, int words,
                          const Sums& sums, const char* ahead, int step) {
  switch (rows) {
#define BATON_ROWS(n)                                                         \
  case n:                                                                     \
    multiply_panel<n, kLines>(x, x_stride, panel, words, sums, ahead, step);  \
    break;
    BATON_ROWS(1) BATON_ROWS(2) BATON_ROWS(3) BATON_ROWS(4) BATON_ROWS(5) BATON_ROWS(6)
#undef BATON_ROWS
    default:
      break;
  }
}

// R rows of x over one group of a panel, scaled, on top of `sums`.
template <int R, class Panel>
inline void multiply_group(const Bf16* x, int64_t x_stride, Panel panel, const float* scales,
                           float* sums) {
  Vec acc[R][kPanelColumns] = {};
  for (int w = 0; w < kGroupWords; ++w) {
    Vec right[kPanelColumns];
    panel.read(w, right);
    if (Panel::kWordBytes < 256)
      for (int b = 0; b < Panel::kWordBytes; b += 64)
        __builtin_prefetch(panel.at + w * Panel::kWordBytes + b + kPrefetchBytes);
    for_each<R, kPanelColumns>([&](auto i, auto j) BATON_INLINE {
      const Vec left = PairWord::broadcast(load_as<int32_t>(x + i * x_stride + 2 * w));
      acc[i][j] = PairWord::multiply_add(acc[i][j], left, right[j]);
    });
  }
  for_each<R, kPanelColumns>([&](auto i, auto j) BATON_INLINE {
    float* to = sums + i * kPanelOutputs + j * kLanes;
    store(to, load(to) + acc[i][j] * load(scales + j * kLanes));
  });
}

template <class Panel>
inline void multiply_group_some(int rows, const Bf16* x, int64_t x_stride, Panel panel,
                                const float* scales, float* sums) {
  switch (rows) {
#define BATON_ROWS(n)                                           \
  case n:                                                       \
    multiply_group<n>(x, x_stride, panel, scales, sums);        \
    break;
    BATON_ROWS(1) BATON_ROWS(2) BATON_ROWS(3) BATON_ROWS(4) BATON_ROWS(5) BATON_ROWS(6)
#undef BATON_ROWS
    default:
      break;
  }
}

// Some rows of one panel of integers: a group at a time, unpacked once if the rows are many.
template <class Panel>
inline void quantized_item(const LinearCall& call, int panel, int64_t first_row, int rows,
                           float* sums) {
  alignas(64) char unpacked[kGroupWords * 256];
  const int inputs = call.weight.inputs, groups = inputs / (2 * kGroupWords);
  const int turns = (rows + kMaxRows - 1) / kMaxRows;
  const char* from = panel_at(call.weight, panel);
  const float* scales = call.weight.scales + (int64_t)panel * groups * kPanelOutputs;
  std::memset(sums, 0, (size_t)rows * kPanelOutputs * 4);
  for (int group = 0; group < groups; ++group, scales += kPanelOutputs) {
    const Panel packed{from + (int64_t)group * kGroupWords * Panel::kWordBytes};
    if (turns > 1)
      for (int w = 0; w < kGroupWords; ++w) packed.read(w, (Vec*)(unpacked + 256 * w));
    for (int turn = 0; turn < turns; ++turn) {
      const int begin = rows * turn / turns, end = rows * (turn + 1) / turns;
      const Bf16* x = call.x + (first_row + begin) * inputs + group * 2 * kGroupWords;
      float* to = sums + begin * kPanelOutputs;
      if (turns > 1)
        multiply_group_some(end - begin, x, inputs, PlainPanel{unpacked}, scales, to);
      else
        multiply_group_some(end - begin, x, inputs, packed, scales, to);
    }
  }
}

// Words of a panel of 12 bits that a thread has unpacked last within a call, for the rows to come.
class Unpacked {
 public:
  // Where `count` words of a panel from `first` on are, or are to be written.
  char* at(int panel, int first, int count) {
    static thread_local Arena arena;
    arena.reserve((size_t)count * kPlainBytes);
    has_ = panel == panel_ && first == first_;
    panel_ = panel;
    first_ = first;
    return arena.data();
  }
  bool has() const { return has_; }

 private:
  int panel_ = -1;
  int first_ = 0;
  bool has_ = false;
};

template <int n>
using Lines = std::integral_constant<int, n>;

// Of the item's rows from `row` on. The usual panel is written at once.
inline Sums sums_of(const LinearCall& call, const Item& item, int row, bool is_first, bool is_last,
                    float* sums) {
  const int64_t outputs = call.weight.outputs;
  const int64_t at = (item.first_row + row) * outputs + item.panel * kPanelOutputs;
  return {sums + row * kPanelOutputs, is_first,
          is_last && is_usual(call, item.panel) ? call.out + at : nullptr,
          call.add == nullptr ? nullptr : call.add + at, outputs};
}

// In bf16, in even groups of at most six rows. One group streams the panel; several share it by
// pieces or blocks, and ask the memory for the next one on the way; of 12 bits the first of many
// groups unpacks them for all others. Each group is written as soon as it is summed: stores of many
// rows at once would be waited for.
template <bool kNarrow>
inline void bf16_item(const LinearCall& call, const Item& item, Unpacked& unpacked, float* sums) {
  const LinearWeight& weight = call.weight;
  constexpr int kBytes = kNarrow ? kNarrowBytes : kPlainBytes;
  const int inputs = weight.inputs, words = inputs / 2, rows = item.rows;
  const int groups = (rows + kMaxRows - 1) / kMaxRows;
  const int most = groups == 1                ? words
                   : groups <= kGroupsByPiece ? kWordsPerPiece
                                              : kWordsPerBlock;
  if (kNarrow) ask_for_plan(weight, item.panel);
  for (int w = 0; w < words; w += most) {
    const int count = words - w < most ? words - w : most;
    const char* next = word_at(weight, item.panel, w + count);
    const auto piece = panel_from<kNarrow>(weight, item.panel, w);
    char* shared = kNarrow && groups >= kGroupsToUnpack ? unpacked.at(item.panel, w, count) : nullptr;
    for (int group = 0; group < groups; ++group) {
      const int begin = rows * group / groups, end = rows * (group + 1) / groups;
      const Bf16* x = call.x + (item.first_row + begin) * inputs + 2 * w;
      const Sums to = sums_of(call, item, begin, w == 0, w + count == words, sums);
      const auto multiply = [&](auto lines, const char* ahead, int step) BATON_INLINE {
        const auto by = [&](auto panel) BATON_INLINE {
          multiply_some<lines>(end - begin, x, inputs, panel, count, to, ahead, step);
        };
        if (shared == nullptr) return by(piece);
        if constexpr (kNarrow) {
          if (group == 0 && !unpacked.has()) return by(UnpackingPanel{piece, shared});
        }
        by(PlainPanel{shared});
      };
      if (groups == 1) {
        multiply(Lines<kBytes / 64>(), piece.at + kPrefetchBytes, kBytes);
      } else if (groups <= 3 && group < 2) {
        multiply(Lines<2>(), next + (int64_t)group * count * (kBytes / 2), kBytes / 2);
      } else if (groups > 3 && groups <= kGroupsByPiece && group < 4) {
        multiply(Lines<1>(), next + (int64_t)group * count * (kBytes / 4), kBytes / 4);
      } else if (groups > kGroupsByPiece) {
        const int turns = groups * item.chunks, turn = groups * item.chunk + group;
        multiply(Lines<1>(), next + (int64_t)count * kBytes * turn / turns,
                 (kBytes + turns - 1) / turns);
      } else {
        multiply(Lines<0>(), nullptr, 0);
      }
      if (w + count == words && to.out == nullptr)
        finish_rows(call, to.kept, item.first_row + begin, end - begin, item.panel);
    }
  }
}


// One thread's part of a call.
class VectorWorker {
 public:
  static constexpr int kRowsTogether = kMaxRows;

  explicit VectorWorker(const LinearCall&) {}

  static int64_t rows_per_block(const LinearCall&) { return 0; }

  void work(const LinearCall& call, const Item& item) {
    alignas(64) float sums[kRowsPerItem * kPanelOutputs];
    switch (call.weight.bits) {
      case 16:
        return bf16_item<false>(call, item, unpacked_, sums);
      case 12:
        return bf16_item<true>(call, item, unpacked_, sums);
      case 8:
        quantized_item<Int8Panel>(call, item.panel, item.first_row, item.rows, sums);
        break;
      default:
        quantized_item<Int4Panel>(call, item.panel, item.first_row, item.rows, sums);
    }
    finish_rows(call, sums, item.first_row, item.rows, item.panel);
  }

 private:
  Unpacked unpacked_;
};

}  // namespace baton

#endif
