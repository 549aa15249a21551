// Linear layers of integer weights and inputs of 8 bits.

#include "for_each.h"
#include "int8_linear.h"

#if defined(BATON_INT8)

namespace baton {
namespace {

constexpr int kInt8Rows = 48;  // whose sums stay in the first cache beside inputs and weights
constexpr int kUnpackedFour = kFour * kPanelOutputs;  // bytes

// Adds, in each lane, the products of four unsigned bytes and four signed ones. Assembly, so that the
// compiler uses VNNI nowhere else: the library also runs on CPUs without it.
BATON_INLINE inline Bits add_products(Bits sums, Bits codes, Bits x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(x));
  return sums;
}

// Four inputs by 16 outputs: those of words `first` and `second` in turn.
template <int kBits, int j>
BATON_INLINE inline Bits four_of(Bits first, Bits second, Bits first_upper, Bits second_upper) {
  Bits low = _mm512_and_si512(moved<-4 * j>(first), _mm512_set1_epi16(15));
  Bits high = _mm512_and_si512(moved<8 - 4 * j>(second), _mm512_set1_epi16(15 << 8));
  if constexpr (kBits > 4) {
    constexpr int kMore = kBits - 4, kMask = (1 << kMore) - 1;
    low = _mm512_or_si512(low, _mm512_and_si512(moved<4 - kMore * j>(first_upper),
                                                _mm512_set1_epi16(kMask << 4)));
    high = _mm512_or_si512(high, _mm512_and_si512(moved<12 - kMore * j>(second_upper),
                                                  _mm512_set1_epi16(kMask << 12)));
  }
  return _mm512_or_si512(low, high);
}

// Four inputs, number `four` of a group, by 64 outputs.
template <int kBits>
BATON_INLINE inline void read_four(const CodeWords<kBits>& from, int four, Bits* to) {
  const Bits first = _mm512_load_si512(from.at + 2 * four * 64);
  const Bits second = _mm512_load_si512(from.at + 2 * four * 64 + 64);
  Bits first_upper{}, second_upper{};
  if constexpr (kBits > 4) {
    first_upper = from.upper_of(2 * four);
    second_upper = from.upper_of(2 * four + 1);
  }
  to[0] = four_of<kBits, 0>(first, second, first_upper, second_upper);
  to[1] = four_of<kBits, 1>(first, second, first_upper, second_upper);
  to[2] = four_of<kBits, 2>(first, second, first_upper, second_upper);
  to[3] = four_of<kBits, 3>(first, second, first_upper, second_upper);
}

// The same of signed bytes, plus 128.
BATON_INLINE inline void read_four(const Int8Panel& from, int four, Bits* to) {
  const Bits order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const Bits sign = _mm512_set1_epi8((char)0x80);
  const char* at = from.at + 2 * four * Int8Panel::kWordBytes;
  for (int j = 0; j < kPanelColumns; j += 2) {
    const auto read = [&](int word) BATON_INLINE {
      const Bits bytes = _mm512_load_si512(at + word * Int8Panel::kWordBytes + 32 * j);
      return _mm512_permutexvar_epi64(order, _mm512_xor_si512(bytes, sign));
    };
    const Bits first = read(0), second = read(1);
    to[j] = _mm512_unpacklo_epi8(first, second);
    to[j + 1] = _mm512_unpackhi_epi8(first, second);
  }
}

// Fours that were unpacked before.
struct UnpackedFours {
  const char* at;
};
BATON_INLINE inline void read_four(const UnpackedFours& from, int four, Bits* to) {
  for (int j = 0; j < kPanelColumns; ++j)
    to[j] = _mm512_load_si512(from.at + four * kUnpackedFour + 64 * j);
}

// What must be known of a panel of quantized blocks.
template <class Format>
struct BlockSource {
  const char* panel;
  static constexpr int kInputs = Format::kInputs;
  static constexpr int kGroupBytes = Format::kGroupBytes;
  static constexpr int kZero = Format::kShape.bits == 8 ? 128 : Format::kShape.zero;
  static constexpr bool kHasOffsets = Format::kShape.has_minimum || Format::kShape.is_scaled;
  BATON_INLINE const char* at(int group) const { return Format::group_at(panel, group); }
  BATON_INLINE auto codes(int group) const { return Format::words_at(at(group)); }
  BATON_INLINE void read(int group, GroupScales& to) const { to.read(Format(), panel, group, 0); }
};

// The same of a panel of Baton's own integers of 8 bits.
struct IntegerSource {
  const char* panel;
  const float* scales;
  static constexpr int kInputs = 32;
  static constexpr int kGroupBytes = kInputs * kPanelOutputs;
  static constexpr int kZero = 128;
  static constexpr bool kHasOffsets = false;
  BATON_INLINE const char* at(int group) const { return panel + (int64_t)group * kGroupBytes; }
  BATON_INLINE Int8Panel codes(int group) const { return {at(group)}; }
  BATON_INLINE void read(int group, GroupScales& to) const {
    const int wide = group * kInputs / (2 * kGroupWords);
    std::memcpy(to.scales, scales + (int64_t)wide * kPanelOutputs, sizeof to.scales);
  }
};

// Lines of a panel that are read with each four inputs.
template <class Source>
constexpr int kLines = (Source::kGroupBytes * kFour / 64 + Source::kInputs - 1) / Source::kInputs;

// Multiplies R rows by one group, and adds to `sums`. `x` is the first row's block, `half` which 16
// inputs of it are meant, where a group has as few.
template <class Source, int R, class Codes>
inline void multiply_int8(const Codes& codes, const Int8Block* x, int half,
                          const GroupScales& scales, float* sums, PageTurns& ahead) {
  constexpr bool kIsStreamed = !std::is_same_v<Codes, UnpackedFours>;
  Bits acc[R][kPanelColumns];
  for_each<R, kPanelColumns>([&](auto i, auto j) BATON_INLINE {
    const int32_t sum = Source::kInputs == 16 ? x[i].sums[half] : x[i].sums[0] + x[i].sums[1];
    acc[i][j] = _mm512_set1_epi32(-Source::kZero * sum);
  });
  for (int four = 0; four < Source::kInputs / kFour; ++four) {
    if constexpr (kIsStreamed) ahead.ask(kLines<Source>);
    Bits right[kPanelColumns];
    read_four(codes, four, right);
    for_each<R, kPanelColumns>([&](auto i, auto j) BATON_INLINE {
      acc[i][j] = add_products(acc[i][j], right[j], _mm512_set1_epi32(x[i].four(4 * half + four)));
    });
  }
  for_each<R, 1>([&](auto i, auto) BATON_INLINE {
    float* to = sums + i * kPanelOutputs;
    const Vec scale = splat(x[i].scale), total = splat(x[i].total);
    Vec all[kPanelColumns];
    for_each<1, kPanelColumns>([&](auto, auto j) BATON_INLINE {
      const Vec products = (Vec)_mm512_cvtepi32_ps(acc[i][j]) * scale;
      all[j] = fused(products, load(scales.scales + j * kLanes), load(to + j * kLanes));
      if constexpr (Source::kHasOffsets)
        all[j] = fused(total, load(scales.sums + j * kLanes), all[j]);
    });
    for_each<1, kPanelColumns>([&](auto, auto j) BATON_INLINE { store(to + j * kLanes, all[j]); });
  });
}

template <class Source, class Codes>
inline void multiply_int8_some(int rows, const Codes& codes, const Int8Block* x, int half,
                               const GroupScales& scales, float* sums, PageTurns& ahead) {
  switch (rows) {
#define BATON_ROWS(n)                                              \
  case n:                                                          \
    multiply_int8<Source, n>(codes, x, half, scales, sums, ahead); \
    break;
    BATON_ROWS(1) BATON_ROWS(2) BATON_ROWS(3) BATON_ROWS(4) BATON_ROWS(5) BATON_ROWS(6)
#undef BATON_ROWS
    default:
      break;
  }
}

// Multiplies some rows by one panel, a group at a time; if they are more than fit the registers, it is
// unpacked first.
template <class Source>
inline void int8_item(const Source& source, int groups, const Int8Inputs& inputs, int64_t first_row,
                      int rows, float* sums) {
  constexpr int kPerBlock = kInt8Inputs / Source::kInputs;
  alignas(64) char unpacked[Source::kInputs * kPanelOutputs];
  const int turns = (rows + kMaxRows - 1) / kMaxRows;
  std::memset(sums, 0, (size_t)rows * kPanelOutputs * sizeof(float));
  PageTurns ahead(source.panel);
  GroupScales scales;
  for (int group = 0; group < groups; ++group) {
    const int half = group % kPerBlock;
    const Int8Block* x = inputs.at(first_row, group / kPerBlock);
    const auto codes = source.codes(group);
    source.read(group, scales);
    if (turns == 1) {
      multiply_int8_some<Source>(rows, codes, x, half, scales, sums, ahead);
      continue;
    }
    for (int four = 0; four < Source::kInputs / kFour; ++four) {
      ahead.ask(kLines<Source>);
      read_four(codes, four, (Bits*)(unpacked + four * kUnpackedFour));
    }
    for (int turn = 0; turn < turns; ++turn) {
      const int begin = rows * turn / turns, end = rows * (turn + 1) / turns;
      multiply_int8_some<Source>(end - begin, UnpackedFours{unpacked}, x + begin, half, scales,
                                 sums + begin * kPanelOutputs, ahead);
    }
  }
}

}  // namespace

bool has_int8() { return __builtin_cpu_supports("avx512vnni"); }

bool takes_int8(const LinearWeight& weight) {
  if (!has_int8()) return false;
  if (weight.bits != 0) return weight.bits == 8;
  bool takes = true;
  for (int i = 0; i < weight.num_parts; ++i)
    with_format(weight.parts[i].kind, [&](auto format) { takes = takes && format.kIsInteger; });
  return takes;
}

void int8_rows(const LinearCall& call, const Int8Inputs& inputs, const Item& item, float* sums) {
  const LinearWeight& weight = call.weight;
  const auto multiply = [&](const auto& source) {
    const int chunks = (item.rows + kInt8Rows - 1) / kInt8Rows;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int begin = item.rows * chunk / chunks, end = item.rows * (chunk + 1) / chunks;
      int8_item(source, weight.inputs / source.kInputs, inputs, item.first_row + begin, end - begin,
                sums + begin * kPanelOutputs);
    }
  };
  if (weight.bits != 0) {
    const float* scales =
        weight.scales + (int64_t)item.panel * (weight.inputs / (2 * kGroupWords)) * kPanelOutputs;
    return multiply(IntegerSource{panel_at(weight, item.panel), scales});
  }
  const BlockPart& part = part_of_panel(weight, item.panel);
  with_format(part.kind, [&](auto format) {
    using Format = decltype(format);
    if constexpr (Format::kIsInteger)
      multiply(BlockSource<Format>{part.panels +
                                   (item.panel - part.first) * Format::panel_bytes(weight.inputs)});
  });
}

}  // namespace baton

#endif
