// Panels of quantized blocks, at no more bits than the files have them.
//
// A span is a block's inputs by 64 outputs: where scales are small integers, first the halves that they
// are multiplied by (64 of scales, 64 of minima), then its groups. A group: scales, minima, the lower four
// bits of its words, the upper ones. Codes become bf16 by their place in its seven bits: of 4 bits as
// 16 + code, of 5 as 32 + code, of 6 as 64 + code; group sums of x take that off again.
//
// Scaled codes have a span for each block: scales in fp32 (64), of integers zeros as halves (64), and
// groups that are codes alone.

#pragma once

#include "file_blocks.h"
#include "integer_panels.h"

#if defined(BATON_PAIRS)

namespace baton {

BATON_INLINE inline Vec halves_at(const char* at) {
#if defined(BATON_HALVES)
  const __m128i* halves = (const __m128i*)at;
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
#else
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#endif
}

template <bool kSigned>
BATON_INLINE inline Vec bytes_at(const char* at) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)at);
#if defined(BATON_HALVES)
  const __m128i upper = _mm_srli_si128(bytes, 8);
  const auto wide = [](__m128i x) BATON_INLINE {
    return kSigned ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x);
  };
  return {_mm256_cvtepi32_ps(wide(bytes)), _mm256_cvtepi32_ps(wide(upper))};
#else
  return (Vec)_mm512_cvtepi32_ps(kSigned ? _mm512_cvtepi8_epi32(bytes)
                                         : _mm512_cvtepu8_epi32(bytes));
#endif
}

// Shifts by `count` to the left, or to the right if it is negative.
template <int kCount>
BATON_INLINE inline Bits moved(Bits x) {
  if constexpr (kCount >= 0) return _mm512_slli_epi16(x, kCount);
  else return _mm512_srli_epi16(x, -kCount);
}

BATON_INLINE inline Bits moved_right(Bits x, int count) {
  const __m128i by = _mm_cvtsi32_si128(count);
#if defined(BATON_HALVES)
  return {_mm256_srl_epi16(x.low, by), _mm256_srl_epi16(x.high, by)};
#else
  return _mm512_srl_epi16(x, by);
#endif
}

// The words of a group of codes of 4, 5 or 6 bits, as bf16 numbers of a base and the code.
template <int kBits>
struct CodeWords {
  const char* at;
  const char* upper;  // what bits are more than four
  static constexpr int kUp = 7 - kBits;                 // where a code begins in bf16's seven bits
  static constexpr int kBase = 1 << kBits;
  static constexpr short kExponent = (short)((127 + kBits) << 7);
  static constexpr int kWordsPerUpper = kBits == 5 ? 4 : 2;  // of 64 bytes

  BATON_INLINE void read(int w, Vec* to) const {
    const Bits low = _mm512_load_si512(at + w * 64);
    Bits high{};
    if constexpr (kBits > 4) high = upper_of(w);
    to[0] = number<0>(low, high);
    to[1] = number<1>(low, high);
    to[2] = number<2>(low, high);
    to[3] = number<3>(low, high);
  }

  // The upper bits of word w, from the lowest of each 16 bits on: first those of the first 16 outputs.
  BATON_INLINE Bits upper_of(int w) const {
    return moved_right(_mm512_load_si512(upper + w / kWordsPerUpper * 64),
                       w % kWordsPerUpper * (16 / kWordsPerUpper));
  }

 private:
  template <int j>
  BATON_INLINE static Vec number(Bits low, Bits high) {
    Bits code = _mm512_and_si512(moved<kUp - 4 * j>(low), _mm512_set1_epi16(15 << kUp));
    if constexpr (kBits > 4) {
      constexpr int kMore = kBits - 4;
      constexpr short kMask = (short)(((1 << kMore) - 1) << (kUp + 4));
      code = _mm512_or_si512(code, _mm512_and_si512(moved<kUp + 4 - kMore * j>(high),
                                                    _mm512_set1_epi16(kMask)));
    }
    return (Vec)_mm512_or_si512(code, _mm512_set1_epi16(kExponent));
  }
};

// How a kind lies in a panel.
template <int kKind>
struct BlockFormat {
  static constexpr BlockShape kShape = shape_of(kKind);
  static constexpr int kInputs = kShape.group;
  static constexpr int kWords = kInputs / 2;
  static constexpr int kScales = kShape.has_minimum ? 2 : 1;
  static constexpr bool kIsInteger = kShape.levels == Levels::kIntegers;
  static constexpr int kScaleBytes =
      kShape.is_scaled ? 0 : kScales * (kShape.is_super ? 64 : 128);
  static constexpr int kLowBytes = kWords * (kShape.bits == 8 ? 128 : 64);
  static constexpr int kHighBytes = kShape.bits == 8 ? 0 : kWords * 16 * (kShape.bits - 4);
  static constexpr int kGroupBytes = kScaleBytes + kLowBytes + kHighBytes;
  static constexpr int kHeadBytes = kShape.is_scaled  ? (kIsInteger ? 384 : 256)
                                    : kShape.is_super ? kScales * 128
                                                      : 0;
  static constexpr int kGroups = kShape.block / kInputs;  // of a span
  static constexpr int kSpanBytes = kHeadBytes + kGroups * kGroupBytes;
  static constexpr int kBase = kShape.bits == 8 || !kIsInteger ? 0 : 1 << kShape.bits;
  static constexpr bool kNeedsSums = kShape.is_scaled ? kIsInteger : kShape.bits != 8;

  static int64_t panel_bytes(int inputs) { return (int64_t)inputs / kShape.block * kSpanBytes; }

  static const char* span_at(const char* panel, int group) {
    return panel + (int64_t)(group / kGroups) * kSpanBytes;
  }
  static const char* group_at(const char* panel, int group) {
    return span_at(panel, group) + kHeadBytes + group % kGroups * kGroupBytes;
  }

  BATON_INLINE static auto words_at(const char* group) {
    if constexpr (kShape.levels == Levels::kE2M1) return Float4Panel{group};
    else if constexpr (kShape.levels == Levels::kE4M3) return Float8Panel{group};
    else if constexpr (kShape.bits == 8) return Int8Panel{group + kScaleBytes};
    else
      return CodeWords<kShape.bits>{group + kScaleBytes, group + kScaleBytes + kLowBytes};
  }

  // For 16 outputs: the factors for the products of a group and for the sums of x, if `base` was
  // added to each code.
  BATON_INLINE static void scales_of(const char* span, const char* group, int j, float base,
                                     Vec& scale, Vec& sums) {
    if constexpr (kShape.is_scaled) {
      scale = load((const float*)span + 16 * j);
      if constexpr (kIsInteger)
        sums = scale * (splat(-base) - halves_at(span + 256 + 32 * j));
      else
        sums = splat(0.0f);
      return;
    }
    if constexpr (kShape.is_super)
      scale = halves_at(span + 32 * j) * bytes_at<kKind == kQ6_K>(group + 16 * j);
    else
      scale = halves_at(group + 32 * j);
    sums = scale * splat(-(base + (float)kShape.zero));
    if constexpr (kShape.has_minimum && kShape.is_super)
      sums = sums - halves_at(span + 128 + 32 * j) * bytes_at<false>(group + 64 + 16 * j);
    else if constexpr (kShape.has_minimum)
      sums = sums + halves_at(group + 128 + 32 * j);
  }
};

// Calls action(format) with the format of a kind.
template <class Action>
BATON_INLINE inline void with_format(int kind, const Action& action) {
  switch (kind) {
    case kQ4_0: return action(BlockFormat<kQ4_0>());
    case kQ4_1: return action(BlockFormat<kQ4_1>());
    case kQ5_0: return action(BlockFormat<kQ5_0>());
    case kQ5_1: return action(BlockFormat<kQ5_1>());
    case kQ8_0: return action(BlockFormat<kQ8_0>());
    case kQ4_K: return action(BlockFormat<kQ4_K>());
    case kQ5_K: return action(BlockFormat<kQ5_K>());
    case kInt4By32: return action(BlockFormat<kInt4By32>());
    case kInt4By64: return action(BlockFormat<kInt4By64>());
    case kInt8By64: return action(BlockFormat<kInt8By64>());
    case kFloat4By16: return action(BlockFormat<kFloat4By16>());
    case kFloat4By32: return action(BlockFormat<kFloat4By32>());
    case kFloat8By64: return action(BlockFormat<kFloat8By64>());
    default: return action(BlockFormat<kQ6_K>());
  }
}

// Where one of a group's codes lies among a panel's words: input `i`, output `o` of 64.
struct CodePlace {
  int word;
  int lane;    // of 16 bits
  int vector;  // of 16 outputs
  CodePlace(int i, int o) : word(i / 2), lane(o % 16 * 2 + i % 2), vector(o / 16) {}
};

template <class Format>
inline void put_code(char* group, int i, int o, uint8_t code) {
  constexpr int kBits = Format::kShape.bits;
  const CodePlace place(i, o);
  char* low = group + Format::kScaleBytes;
  if constexpr (kBits == 8) {
    low[place.word * 128 + place.vector * 32 + place.lane] = (char)code;
    return;
  }
  uint16_t* lanes = (uint16_t*)(low + place.word * 64);
  lanes[place.lane] = (uint16_t)(lanes[place.lane] | (code & 15) << 4 * place.vector);
  if constexpr (kBits > 4 && kBits < 8) {
    constexpr int kPer = CodeWords<kBits>::kWordsPerUpper;
    uint16_t* upper = (uint16_t*)(low + Format::kLowBytes + place.word / kPer * 64);
    const int shift = place.word % kPer * (16 / kPer) + (kBits - 4) * place.vector;
    upper[place.lane] = (uint16_t)(upper[place.lane] | (code >> 4) << shift);
  }
}

template <class Format>
inline uint8_t code_in(const char* group, int i, int o) {
  constexpr int kBits = Format::kShape.bits;
  const CodePlace place(i, o);
  const char* low = group + Format::kScaleBytes;
  if constexpr (kBits == 8)
    return (uint8_t)low[place.word * 128 + place.vector * 32 + place.lane];
  int code = ((const uint16_t*)(low + place.word * 64))[place.lane] >> 4 * place.vector & 15;
  if constexpr (kBits > 4 && kBits < 8) {
    constexpr int kPer = CodeWords<kBits>::kWordsPerUpper;
    const uint16_t* upper = (const uint16_t*)(low + Format::kLowBytes + place.word / kPer * 64);
    const int shift = place.word % kPer * (16 / kPer) + (kBits - 4) * place.vector;
    code |= (upper[place.lane] >> shift & ((1 << (kBits - 4)) - 1)) << 4;
  }
  return (uint8_t)code;
}

template <class Format>
inline void put_scales(const FileGroup& from, char* span, char* group, int o) {
  if constexpr (Format::kShape.is_scaled) {
    ((float*)span)[o] = from.wide_scale;
    if (Format::kIsInteger) ((uint16_t*)(span + 256))[o] = to_half(from.wide_zero);
    return;
  }
  uint16_t* halves = (uint16_t*)(Format::kShape.is_super ? span : group);
  halves[o] = from.scale;
  if (Format::kShape.has_minimum) halves[64 + o] = from.minimum;
  if (Format::kShape.is_super) {
    group[o] = (char)from.factor;
    if (Format::kShape.has_minimum) group[64 + o] = (char)from.minimum_factor;
  }
}

// Packs `outputs` rows of a file, from `rows` on, each `row_bytes` long, into a panel, whose other
// outputs become zeros. Output o is row `order[o]`.
template <class Format>
inline void pack_blocks(int kind, const FileRows& rows, const int64_t* order, int outputs,
                        char* panel) {
  std::memset(panel, 0, (size_t)Format::panel_bytes(rows.inputs));
  for (int o = 0; o < outputs; ++o)
    for (int g = 0; g < rows.inputs / Format::kInputs; ++g) {
      const FileGroup from = read_group(kind, rows.at + order[o] * rows.row_bytes, g);
      char* span = (char*)Format::span_at(panel, g);
      char* group = (char*)Format::group_at(panel, g);
      put_scales<Format>(from, span, group, o);
      for (int i = 0; i < Format::kInputs; ++i) put_code<Format>(group, i, o, from.codes[i]);
    }
}

// The group of output `o` that `pack_blocks` has packed.
template <class Format>
inline FileGroup packed_group(const char* panel, int g, int o) {
  const char* span = Format::span_at(panel, g);
  const char* group = Format::group_at(panel, g);
  const uint16_t* halves = (const uint16_t*)(Format::kShape.is_super ? span : group);
  FileGroup found{};
  found.factor = found.minimum_factor = 1;
  if constexpr (Format::kShape.is_scaled) {
    found.wide_scale = ((const float*)span)[o];
    if (Format::kIsInteger) found.wide_zero = to_float(((const uint16_t*)(span + 256))[o]);
  } else {
    found.scale = halves[o];
  }
  if (Format::kShape.has_minimum) found.minimum = halves[64 + o];
  if (Format::kShape.is_super) {
    found.factor = Format::kShape.has_minimum ? (uint8_t)group[o] : (int8_t)group[o];
    if (Format::kShape.has_minimum) found.minimum_factor = (uint8_t)group[64 + o];
  }
  for (int i = 0; i < Format::kInputs; ++i) found.codes[i] = code_in<Format>(group, i, o);
  return found;
}

}  // namespace baton

#endif
