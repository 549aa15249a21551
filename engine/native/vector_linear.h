// Linear layers by vectors of sixteen dot products: a panel is streamed once where its rows fit the
// registers. With a few more rows, a core keeps a piece of the panel in its first cache until all
// rows were multiplied by it; with many, it keeps the panel in its second cache. With vectors of
// two halves (avx2.h) there are few registers, so two or more rows are multiplied by pieces that
// were unpacked before.

#pragma once

#include "block_linear.h"
#include "for_each.h"
#include "int8_linear.h"
#include "left_rows.h"
#include "normal_numbers.h"
#include "page_turns.h"

#if defined(BATON_PAIRS)

namespace baton {

constexpr int kGroupsByPiece = 6;      // of rows; more of them are bound by arithmetic
constexpr int kUnpackedBytes = PairWord::kPasses * kPlainBytes;  // of a word: all of its parts
constexpr int kWordsPerPiece = (16 << 10) / kUnpackedBytes;      // a third of a usual first cache
constexpr int kWordsPerBlock = (512 << 10) / kUnpackedBytes;     // half of a usual second cache
// The groups of rows that share what the first one unpacks: words of 12 bits, or of two parts.
constexpr int kGroupsToUnpack = PairWord::kPasses == 1 ? 5 : 2;

// Prefetches kLines lines with each word; the lines of the next word are `step` bytes further on.
template <int kLines>
struct LinesAhead {
  const char* at;
  int step;
  BATON_INLINE void ask() {
    for (int j = 0; j < kLines; ++j) __builtin_prefetch(at + 64 * j);
    at += step;
  }
};

// Prefetches as many lines as the word that is being read has, from some distance ahead.
template <int kLines>
struct LinesInOrder : LinesAhead<kLines> {
  explicit LinesInOrder(const char* at) : LinesAhead<kLines>{at + 1024, 64 * kLines} {}
};

template <int kLines>
struct LinesByPages {
  PageTurns stream;
  explicit LinesByPages(const char* at) : stream(at) {}
  BATON_INLINE void ask() { stream.ask(kLines); }
};

// How memory that is streamed is prefetched: what was fastest on Intel's CPUs, the only ones measured.
template <int kLines>
using Streamed =
    std::conditional_t<PairWord::kPasses == 2, LinesByPages<kLines>, LinesInOrder<kLines>>;

// Prefetches nothing new, only a line that is in the cache, so that no other kind of loop is
// needed.
inline LinesAhead<1> no_lines(const void* at_hand) { return {(const char*)at_hand, 0}; }

// Where the sums of some rows and one panel are written.
struct Sums {
  float* kept;      // [rows, 64]: those of words before, and, where more words follow, of these
  bool is_first;    // there are none before
  Bf16* out;        // the last words': where they are rounded to, rows `stride` apart; null: kept
  const Bf16* add;  // on top of these; or null
  int64_t stride;
};

// Vector j of a word's 64 outputs, for one pass.
template <int kPass>
BATON_INLINE inline Vec part_of(const Vec* word, int j) {
  return PairWord::part<kPass>(word[j]);
}

// A word whose parts were written before.
struct UnpackedWord {
  const Vec* at;
};
template <int kPass>
BATON_INLINE inline Vec part_of(const UnpackedWord& word, int j) {
  return word.at[kPass * kPanelColumns + j];
}

// The parts of a panel's words, written before.
struct UnpackedPanel {
  const char* at;
};
template <class Action>
BATON_INLINE inline void for_words(const UnpackedPanel& panel, int words, const Action& action) {
  for (int w = 0; w < words; ++w)
    action(w, UnpackedWord{(const Vec*)(panel.at + w * kUnpackedBytes)});
}

#if !defined(__AVX512BF16__)
// Integers become fp32 at once.
template <class Action>
BATON_INLINE inline void for_words(const Int8Panel& panel, int words, const Action& action) {
  for (int w = 0; w < words; ++w) {
    Vec parts[PairWord::kPasses * kPanelColumns];
    panel.read_parts(w, parts);
    action(w, UnpackedWord{parts});
  }
}
#endif

// A panel that stores the parts of what it reads, for other rows.
template <class Panel>
struct UnpackingPanel {
  Panel from;
  char* to;
};
template <class Panel, class Action>
BATON_INLINE inline void for_words(const UnpackingPanel<Panel>& panel, int words,
                                   const Action& action) {
  for_words(panel.from, words, [&](int w, const auto& right) BATON_INLINE {
    Vec* to = (Vec*)(panel.to + w * kUnpackedBytes);
    for_passes([&](auto pass) BATON_INLINE {
      for (int j = 0; j < kPanelColumns; ++j)
        to[pass * kPanelColumns + j] = part_of<pass>(right, j);
    });
    action(w, UnpackedWord{to});
  });
}

// The number of a panel's columns that R rows are multiplied by at a time, so that their sums stay
// in registers.
template <int R>
constexpr int kColumnsSummed = !kHalves || R == 1 ? kPanelColumns : R == 2 ? 2 : 1;
constexpr int kRowsStreamed = kHalves ? 1 : kMaxRows;  // for all columns at a time

// Unpacks the first `words` words of a panel, to be multiplied later.
template <class Panel, class Lines>
inline void unpack(Panel panel, int words, char* to, Lines lines) {
  for_words(UnpackingPanel<Panel>{panel, to}, words, [&](int, const auto&) BATON_INLINE {
    lines.ask();
  });
}

// Multiplies R rows of x by some columns of a word of a panel, from `first` on. `x` points to the
// first row's pair; rows are `stride` apart.
template <int R, int C, class Right>
BATON_INLINE inline void add_word(const PairType* x, int64_t stride, const Right& right, int first,
                                  Vec (&acc)[R][C]) {
  for_passes([&](auto pass) BATON_INLINE {
    Vec part[C];
    for (int j = 0; j < C; ++j) part[j] = part_of<pass>(right, first + j);
    for_each<R, C>([&](auto i, auto j) BATON_INLINE {
      const Vec left = PairWord::broadcast(x[i * stride + pass]);
      acc[i][j] = PairWord::multiply_add(acc[i][j], left, part[j]);
    });
  });
}

// Multiplies R rows of x by `words` words of a panel. With each word, `lines` prefetches.
template <int R, class Panel, class Lines>
inline void multiply_panel(const PairType* x, int64_t x_stride, Panel panel, int words,
                           const Sums& sums, Lines lines) {
  constexpr int C = kColumnsSummed<R>;
  const auto write = [&](auto i, auto half, Vec low, Vec high) BATON_INLINE {
    const int64_t at = i * sums.stride + 2 * half * kLanes;
    write_sums(low, high, sums.add == nullptr ? nullptr : sums.add + at, sums.out + at);
  };
  for (int first = 0; first < kPanelColumns; first += C) {
    float* const kept = sums.kept + first * kLanes;
    Vec acc[R][C];
    for_each<R, C>([&](auto i, auto j) BATON_INLINE {
      acc[i][j] = sums.is_first ? Vec{} : load(kept + i * kPanelOutputs + j * kLanes);
    });
    for_words(panel, words, [&](int w, const auto& right) BATON_INLINE {
      lines.ask();
      add_word(x + w * PairWord::kPasses, x_stride, right, first, acc);
    });
    if constexpr (C == kPanelColumns)
      if (sums.out != nullptr)
        return for_each<R, C / 2>([&](auto i, auto half) BATON_INLINE {
          write(i, half, acc[i][2 * half], acc[i][2 * half + 1]);
        });
    for_each<R, C>([&](auto i, auto j) BATON_INLINE {
      store(kept + i * kPanelOutputs + j * kLanes, acc[i][j]);
    });
  }
  if (sums.out == nullptr) return;
  for_each<R, kPanelColumns / 2>([&](auto i, auto half) BATON_INLINE {
    const float* kept = sums.kept + i * kPanelOutputs + 2 * half * kLanes;
    write(i, half, load(kept), load(kept + kLanes));
  });
}

template <class Panel, class Lines>
inline void multiply_some(int rows, const PairType* x, int64_t x_stride, Panel panel, int words,
                          const Sums& sums, Lines lines) {
  switch (rows) {
#define BATON_ROWS(n)                                         \
  case n:                                                     \
    multiply_panel<n>(x, x_stride, panel, words, sums, lines); \
    break;
    BATON_ROWS(1) BATON_ROWS(2) BATON_ROWS(3) BATON_ROWS(4) BATON_ROWS(5) BATON_ROWS(6)
#undef BATON_ROWS
    default:
      break;
  }
}

// Multiplies R rows of x by one group of a panel, and adds the scaled sums to `sums`. With each
// word, `lines` prefetches.
template <int R, class Panel, class Lines>
inline void multiply_group(const PairType* x, int64_t x_stride, Panel panel, const float* scales,
                           float* sums, Lines lines) {
  constexpr int C = kColumnsSummed<R>;
  for (int first = 0; first < kPanelColumns; first += C) {
    Vec acc[R][C] = {};
    for_words(panel, kGroupWords, [&](int w, const auto& right) BATON_INLINE {
      lines.ask();
      add_word(x + w * PairWord::kPasses, x_stride, right, first, acc);
    });
    for_each<R, C>([&](auto i, auto j) BATON_INLINE {
      float* to = sums + i * kPanelOutputs + (first + j) * kLanes;
      store(to, load(to) + acc[i][j] * load(scales + (first + j) * kLanes));
    });
  }
}

template <class Panel, class Lines>
inline void multiply_group_some(int rows, const PairType* x, int64_t x_stride, Panel panel,
                                const float* scales, float* sums, Lines lines) {
  switch (rows) {
#define BATON_ROWS(n)                                          \
  case n:                                                      \
    multiply_group<n>(x, x_stride, panel, scales, sums, lines); \
    break;
    BATON_ROWS(1) BATON_ROWS(2) BATON_ROWS(3) BATON_ROWS(4) BATON_ROWS(5) BATON_ROWS(6)
#undef BATON_ROWS
    default:
      break;
  }
}

// Multiplies some rows by one panel of integers, a group at a time; if there are many rows, the
// first ones unpack it for all.
template <class Panel>
inline void quantized_item(const LinearCall& call, const LeftRows& left, int panel,
                           int64_t first_row, int rows, float* sums) {
  alignas(64) char unpacked[kGroupWords * kUnpackedBytes];
  const int inputs = call.weight.inputs, groups = inputs / (2 * kGroupWords);
  const int turns = (rows + kMaxRows - 1) / kMaxRows;
  const char* from = panel_at(call.weight, panel);
  const float* scales = call.weight.scales + (int64_t)panel * groups * kPanelOutputs;
  std::memset(sums, 0, (size_t)rows * kPanelOutputs * 4);
  for (int group = 0; group < groups; ++group, scales += kPanelOutputs) {
    const Panel packed{from + (int64_t)group * kGroupWords * Panel::kWordBytes};
    for (int turn = 0; turn < turns; ++turn) {
      const int begin = rows * turn / turns, end = rows * (turn + 1) / turns;
      const auto multiply = [&](auto by, auto lines) BATON_INLINE {
        multiply_group_some(end - begin, left.at(first_row + begin, group * kGroupWords),
                            left.stride(), by, scales, sums + begin * kPanelOutputs, lines);
      };
      const Streamed<Panel::kWordBytes / 64> lines(packed.at);
      if (rows <= kRowsStreamed) {
        multiply(packed, lines);
      } else if (turn == 0 && !kHalves) {
        multiply(UnpackingPanel<Panel>{packed, unpacked}, lines);
      } else {
        if (turn == 0) unpack(packed, kGroupWords, unpacked, lines);
        multiply(UnpackedPanel{unpacked}, no_lines(unpacked));
      }
    }
  }
}

// Multiplies R rows of x by one group of blocks, and adds to `sums`.
template <int R, class Format, class Panel, class Lines>
inline void multiply_blocks(Format format, const PairType* x, int64_t x_stride, Panel panel,
                            const GroupScales& group, const float* input_sums, float* sums,
                            Lines lines) {
  constexpr int C = kColumnsSummed<R>;
  for (int first = 0; first < kPanelColumns; first += C) {
    Vec acc[R][C] = {};
    for_words(panel, Format::kWords, [&](int w, const auto& right) BATON_INLINE {
      lines.ask();
      add_word(x + w * PairWord::kPasses, x_stride, right, first, acc);
    });
    for_each<R, C>([&](auto i, auto j) BATON_INLINE {
      const int at = (first + j) * kLanes;
      add_group(format, acc[i][j], group, at, input_sums[i], sums + i * kPanelOutputs + at);
    });
  }
}

template <class Format, class Panel, class Lines>
inline void multiply_blocks_some(Format format, int rows, const PairType* x, int64_t x_stride,
                                 Panel panel, const GroupScales& group, const float* input_sums,
                                 float* sums, Lines lines) {
  switch (rows) {
#define BATON_ROWS(n)                                                                        \
  case n:                                                                                    \
    multiply_blocks<n>(format, x, x_stride, panel, group, input_sums, sums, lines);          \
    break;
    BATON_ROWS(1) BATON_ROWS(2) BATON_ROWS(3) BATON_ROWS(4) BATON_ROWS(5) BATON_ROWS(6)
#undef BATON_ROWS
    default:
      break;
  }
}

// Multiplies some rows by one panel of blocks, `panel`, a group at a time; if there are many rows,
// the first ones unpack it for all.
template <class Format>
inline void block_item(Format format, const LinearCall& call, const LeftRows& left,
                       const InputSums& input_sums, const char* panel, const Item& item,
                       float* sums) {
  alignas(64) char unpacked[Format::kWords * kUnpackedBytes];
  constexpr int kLines = Format::kGroupBytes / 64 / Format::kWords + 1;
  const int groups = call.weight.inputs / Format::kInputs, rows = item.rows;
  const int turns = (rows + kMaxRows - 1) / kMaxRows;
  std::memset(sums, 0, (size_t)rows * kPanelOutputs * 4);
  GroupScales scales;
  for (int group = 0; group < groups; ++group) {
    const char* at = Format::group_at(panel, group);
    const auto packed = Format::words_at(at);
    const Streamed<kLines> lines(at);
    scales.read(format, panel, group);
    for (int turn = 0; turn < turns; ++turn) {
      const int begin = rows * turn / turns, end = rows * (turn + 1) / turns;
      float of_inputs[kMaxRows] = {};
      for (int i = begin; Format::kNeedsSums && i < end; ++i)
        of_inputs[i - begin] = input_sums.of(item.first_row + i, group, Format::kInputs);
      const auto multiply = [&](auto by, auto asked) BATON_INLINE {
        multiply_blocks_some(format, end - begin,
                             left.at(item.first_row + begin, group * Format::kWords), left.stride(),
                             by, scales, of_inputs, sums + begin * kPanelOutputs, asked);
      };
      if (rows <= kRowsStreamed) {
        multiply(packed, lines);
      } else if (turn == 0 && !kHalves) {
        multiply(UnpackingPanel<std::decay_t<decltype(packed)>>{packed, unpacked}, lines);
      } else {
        if (turn == 0) unpack(packed, Format::kWords, unpacked, lines);
        multiply(UnpackedPanel{unpacked}, no_lines(unpacked));
      }
    }
  }
}

// Compiled in a file of its own, for CPUs without tiles.
void block_rows(const LinearCall& call, const LeftRows& left, const InputSums& input_sums,
                const Item& item, float* sums);

// Words of a panel that a thread has unpacked last within a call, for the rows to come.
class Unpacked {
 public:
  // Where `count` words of the panel that lies at `panel` are, from `first` on, or are to be written.
  char* at(const char* panel, int first, int count) {
    static thread_local Arena arena;
    arena.reserve((size_t)count * kUnpackedBytes);
    has_ = panel == panel_ && first == first_;
    panel_ = panel;
    first_ = first;
    return arena.data();
  }
  bool has() const { return has_; }

 private:
  const char* panel_ = nullptr;
  int first_ = 0;
  bool has_ = false;
};

// Where the sums of the item's rows from `row` on are written. The usual panel is written at once.
inline Sums sums_of(const LinearCall& call, const Item& item, int row, bool is_first, bool is_last,
                    float* sums) {
  const int64_t outputs = call.weight.outputs;
  const int64_t at = (item.first_row + row) * outputs + item.panel * kPanelOutputs;
  return {sums + row * kPanelOutputs, is_first,
          is_last && is_usual(call, item.panel) ? call.out + at : nullptr,
          call.add == nullptr ? nullptr : call.add + at, outputs};
}

// Multiplies one group of rows in bf16 while it streams the panel.
template <bool kNarrow>
inline void streamed_rows(const LinearCall& call, const Item& item, const LeftRows& left,
                          float* sums) {
  const auto panel = panel_from<kNarrow>(call.weight, item.panel, 0);
  const Sums to = sums_of(call, item, 0, true, true, sums);
  multiply_some(item.rows, left.at(item.first_row, 0), left.stride(), panel, call.weight.inputs / 2,
                to, Streamed<kWordBytes<kNarrow> / 64>(panel.at));
  if (to.out == nullptr) finish_rows(call, to.kept, item.first_row, item.rows, item.panel);
}

// Multiplies some rows in bf16 with few registers: a piece of the panel is unpacked, then all
// groups are multiplied by it.
template <bool kNarrow>
inline void unpacked_rows(const LinearCall& call, const Item& item, const LeftRows& left,
                          float* sums) {
  alignas(64) char parts[kWordsPerPiece * kUnpackedBytes];
  const int words = call.weight.inputs / 2, groups = (item.rows + kMaxRows - 1) / kMaxRows;
  for (int w = 0; w < words; w += kWordsPerPiece) {
    const int count = words - w < kWordsPerPiece ? words - w : kWordsPerPiece;
    const auto piece = panel_from<kNarrow>(call.weight, item.panel, w);
    unpack(piece, count, parts, Streamed<kWordBytes<kNarrow> / 64>(piece.at));
    for (int group = 0; group < groups; ++group) {
      const int begin = item.rows * group / groups, end = item.rows * (group + 1) / groups;
      const Sums to = sums_of(call, item, begin, w == 0, w + count == words, sums);
      multiply_some(end - begin, left.at(item.first_row + begin, w), left.stride(),
                    UnpackedPanel{parts}, count, to, no_lines(parts));
      if (w + count == words && to.out == nullptr)
        finish_rows(call, to.kept, item.first_row + begin, end - begin, item.panel);
    }
  }
}

// Several groups share a panel, piece by piece or block by block, and prefetch the next one
// meanwhile; if there are many, the first unpacks it for all others. Each group is written as soon
// as it is summed, because stores of many rows at once would be waited for.
template <bool kNarrow>
inline void shared_rows(const LinearCall& call, const Item& item, const LeftRows& left,
                        Unpacked& unpacked, float* sums) {
  constexpr int kBytes = kWordBytes<kNarrow>;
  constexpr bool kMayUnpack = kNarrow || PairWord::kPasses > 1;
  constexpr bool kMustUnpack = kMayUnpack && kGroupsToUnpack == 2;
  const LinearWeight& weight = call.weight;
  const int words = weight.inputs / 2, rows = item.rows;
  const int groups = (rows + kMaxRows - 1) / kMaxRows;
  const int most = groups <= kGroupsByPiece ? kWordsPerPiece : kWordsPerBlock;
  const bool is_unpacked = kMayUnpack && groups >= kGroupsToUnpack;
  const char* at = panel_at(weight, item.panel);
  for (int w = 0; w < words; w += most) {
    const int count = words - w < most ? words - w : most;
    const char* next = word_at(weight, item.panel, w + count);
    const auto piece = panel_from<kNarrow>(weight, item.panel, w);
    char* shared = is_unpacked ? unpacked.at(at, w, count) : nullptr;
    for (int group = 0; group < groups; ++group) {
      const int begin = rows * group / groups, end = rows * (group + 1) / groups;
      const PairType* x = left.at(item.first_row + begin, w);
      const Sums to = sums_of(call, item, begin, w == 0, w + count == words, sums);
      const auto multiply = [&](auto lines) BATON_INLINE {
        const auto by = [&](auto panel) BATON_INLINE {
          multiply_some(end - begin, x, left.stride(), panel, count, to, lines);
        };
        if constexpr (!kMustUnpack)
          if (!is_unpacked) return by(piece);
        if constexpr (kMayUnpack) {
          if (group == 0 && !unpacked.has())
            return by(UnpackingPanel<decltype(piece)>{piece, shared});
          by(UnpackedPanel{shared});
        }
      };
      if (groups <= 3 && group < 2) {
        multiply(LinesAhead<2>{next + (int64_t)group * count * (kBytes / 2), kBytes / 2});
      } else if (groups > 3 && groups <= kGroupsByPiece && group < 4) {
        multiply(LinesAhead<1>{next + (int64_t)group * count * (kBytes / 4), kBytes / 4});
      } else if (groups > kGroupsByPiece) {
        const int turns = groups * item.chunks, turn = groups * item.chunk + group;
        multiply(LinesAhead<1>{next + (int64_t)count * kBytes * turn / turns,
                               (kBytes + turns - 1) / turns});
      } else {
        multiply(no_lines(x));
      }
      if (w + count == words && to.out == nullptr)
        finish_rows(call, to.kept, item.first_row + begin, end - begin, item.panel);
    }
  }
}

// Multiplies in bf16, in even groups of at most six rows.
template <bool kNarrow>
void bf16_item(const LinearCall& call, const Item& item, const LeftRows& left,
                      Unpacked& unpacked, float* sums) {
  if (kNarrow) ask_for_plan(call.weight, item.panel);
  if (item.rows <= kRowsStreamed) return streamed_rows<kNarrow>(call, item, left, sums);
  if constexpr (kHalves) unpacked_rows<kNarrow>(call, item, left, sums);
  else shared_rows<kNarrow>(call, item, left, unpacked, sums);
}

#if !defined(__AMX_BF16__)
// Compiled in a file of its own, because it takes long to compile.
extern template void bf16_item<true>(const LinearCall&, const Item&, const LeftRows&, Unpacked&,
                                     float*);
#endif

// One thread's part of a call.
class VectorWorker {
 public:
  static constexpr int kRowsTogether = kMaxRows;

  explicit VectorWorker(const LinearCall& call)
      : left_(call), input_sums_(call)
#if defined(BATON_INT8)
      , int8_inputs_(call)
#endif
  {}

  static int64_t rows_per_block(const LinearCall&) { return 0; }

  void work(const LinearCall& call, const Item& item) {
    alignas(64) float sums[kRowsPerItem * kPanelOutputs];
#if defined(BATON_INT8)
    if (call.weight.has_int8_inputs) {
      int8_rows(call, int8_inputs_, item, sums);
      return finish_rows(call, sums, item.first_row, item.rows, item.panel);
    }
#endif
    switch (call.weight.bits) {
      case 0:
        block_rows(call, left_, input_sums_, item, sums);
        break;
      case 16:
        return bf16_item<false>(call, item, left_, unpacked_, sums);
      case 12:
        return bf16_item<true>(call, item, left_, unpacked_, sums);
      default:
        quantized_item<Int8Panel>(call, left_, item.panel, item.first_row, item.rows, sums);
    }
    finish_rows(call, sums, item.first_row, item.rows, item.panel);
  }

 private:
  NormalNumbers numbers_;
  LeftRows left_;
  InputSums input_sums_;
#if defined(BATON_INT8)
  Int8Inputs int8_inputs_;
#endif
  Unpacked unpacked_;
};

}  // namespace baton

#endif
