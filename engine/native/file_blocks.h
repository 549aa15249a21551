// Quantized blocks as GGUF files hold them, and scaled codes of other formats: the numbers and scales of
// a row's groups.
//
// Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A value is
// scale * (code - zero) - minimum; its products are exact in fp32, so that it is rounded at most once.
// Scaled codes have a scale and a zero in fp32 for each block, then a byte for each code: see
// engine/checkpoint/formats/panel_rows.py. A value is (level of the code - zero) * scale.

#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(BATON_PAIRS)

namespace baton {

// Kinds of blocks by their numbers in the files, as `BLOCK_TYPES` in checkpoint/gguf/header.py has
// them. From 64 on they are our own, as in `SCALED_TYPES` in engine/checkpoint/quantized_blocks.py:
// integers and floats of 4 or 8 bits, one for each number of inputs in a block.
enum BlockKind : int32_t {
  kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14,
  kInt4By32 = 64, kInt4By64 = 65, kInt8By64 = 66, kFloat4By16 = 67, kFloat4By32 = 68, kFloat8By64 = 69
};

enum class Levels { kIntegers, kE2M1, kE4M3 };  // what codes stand for

constexpr int kSuperInputs = 256;  // of a block of groups whose scales are small integers
constexpr int kMostGroupInputs = 32;

// One group of a row, as it lies in a file. Its scale is `scale` times `factor`, its minimum
// `minimum` times `minimum_factor`; `scale` and `minimum` are halves in 16 bits.
struct FileGroup {
  uint8_t codes[kMostGroupInputs];  // integers from 0 on; of 8 bits signed ones
  uint16_t scale;
  uint16_t minimum;
  int factor;
  int minimum_factor;
  float wide_scale;  // of scaled codes, instead of all of these
  float wide_zero;
};

struct BlockShape {
  int bits;
  int group;     // inputs that share a scale
  int block;     // inputs of a block
  int bytes;     // of a block
  int zero;      // the code of no scale at all; 0 where there is a minimum
  bool has_minimum;
  bool is_super;
  bool is_scaled = false;
  Levels levels = Levels::kIntegers;
};

constexpr int kScaledHead = 8;  // bytes of a block of scaled codes before the codes

constexpr BlockShape shape_of(int kind) {
  switch (kind) {
    case kQ4_0: return {4, 32, 32, 18, 8, false, false};
    case kQ4_1: return {4, 32, 32, 20, 0, true, false};
    case kQ5_0: return {5, 32, 32, 22, 16, false, false};
    case kQ5_1: return {5, 32, 32, 24, 0, true, false};
    case kQ8_0: return {8, 32, 32, 34, 0, false, false};
    case kQ4_K: return {4, 32, 256, 144, 0, true, true};
    case kQ5_K: return {5, 32, 256, 176, 0, true, true};
    case kInt4By32: return {4, 32, 32, kScaledHead + 32, 0, false, false, true};
    case kInt4By64: return {4, 32, 64, kScaledHead + 64, 0, false, false, true};
    case kInt8By64: return {8, 32, 64, kScaledHead + 64, 0, false, false, true};
    case kFloat4By16: return {4, 16, 16, kScaledHead + 16, 0, false, false, true, Levels::kE2M1};
    case kFloat4By32: return {4, 32, 32, kScaledHead + 32, 0, false, false, true, Levels::kE2M1};
    case kFloat8By64: return {8, 32, 64, kScaledHead + 64, 0, false, false, true, Levels::kE4M3};
    default: return {6, 16, 256, 210, 32, false, true};
  }
}

inline uint16_t half_at(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return bits;
}

inline float to_float(uint16_t half) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

inline uint16_t to_half(float x) {
  return (uint16_t)_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), 0));
}

// The 6-bit scale and minimum of a group of Q4_K and Q5_K: those of the last four groups have their upper
// two bits in the bytes of the first four.
inline void read_factors(const uint8_t* packed, int group, FileGroup& to) {
  if (group < 4) {
    to.factor = packed[group] & 63;
    to.minimum_factor = packed[group + 4] & 63;
  } else {
    to.factor = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4;
    to.minimum_factor = packed[group + 4] >> 4 | (packed[group] >> 6) << 4;
  }
}

// A block of 32 codes of 4 bits, in halves, and perhaps 32 upper bits.
inline void read_halves(const uint8_t* low, const uint8_t* high, FileGroup& to) {
  uint32_t upper = 0;
  if (high != nullptr) std::memcpy(&upper, high, 4);
  for (int i = 0; i < 16; ++i) {
    to.codes[i] = (uint8_t)((low[i] & 15) | (upper >> i & 1) << 4);
    to.codes[i + 16] = (uint8_t)(low[i] >> 4 | (upper >> (i + 16) & 1) << 4);
  }
}

// Group `group` of Q4_K and Q5_K: two groups share 32 bytes.
inline void read_shared(const uint8_t* low, const uint8_t* high, int group, FileGroup& to) {
  low += group / 2 * 32;
  for (int i = 0; i < 32; ++i) {
    const int code = group % 2 == 0 ? low[i] & 15 : low[i] >> 4;
    to.codes[i] = (uint8_t)(high == nullptr ? code : code | (high[i] >> group & 1) << 4);
  }
}

// Group `group` of Q6_K: of 128 inputs, each 32 neighbours share 32 bytes of lower bits with the 32
// that come 64 later, and all share 32 bytes of upper bits.
inline void read_sixteen(const uint8_t* block, int group, FileGroup& to) {
  const int half = group / 8, quarter = group % 8 / 2, first = group % 2 * 16;
  const uint8_t* low = block + half * 64 + quarter % 2 * 32 + first;
  const uint8_t* high = block + 128 + half * 32 + first;
  for (int i = 0; i < 16; ++i) {
    const int code = quarter < 2 ? low[i] & 15 : low[i] >> 4;
    to.codes[i] = (uint8_t)(code | (high[i] >> 2 * quarter & 3) << 4);
  }
}

// Group `group` of a row that begins at `row`.
inline FileGroup read_group(int kind, const uint8_t* row, int group) {
  const BlockShape shape = shape_of(kind);
  const int per_block = shape.block / shape.group, within = group % per_block;
  const uint8_t* block = row + (int64_t)(group / per_block) * shape.bytes;
  FileGroup found{};
  found.factor = found.minimum_factor = 1;
  if (shape.is_scaled) {
    std::memcpy(&found.wide_scale, block, 4);
    std::memcpy(&found.wide_zero, block + 4, 4);
    std::memcpy(found.codes, block + kScaledHead + within * shape.group, (size_t)shape.group);
    return found;
  }
  found.scale = half_at(kind == kQ6_K ? block + 208 : block);
  if (shape.has_minimum) found.minimum = half_at(block + 2);
  switch (kind) {
    case kQ4_0: read_halves(block + 2, nullptr, found); break;
    case kQ4_1: read_halves(block + 4, nullptr, found); break;
    case kQ5_0: read_halves(block + 6, block + 2, found); break;
    case kQ5_1: read_halves(block + 8, block + 4, found); break;
    case kQ8_0: std::memcpy(found.codes, block + 2, 32); break;
    case kQ4_K:
      read_factors(block + 4, within, found);
      read_shared(block + 16, nullptr, within, found);
      break;
    case kQ5_K:
      read_factors(block + 4, within, found);
      read_shared(block + 48, block + 16, within, found);
      break;
    default:
      found.factor = (int8_t)block[192 + within];
      read_sixteen(block, within, found);
  }
  return found;
}

inline float level_of(const BlockShape& shape, uint8_t code) {
  constexpr float kSizes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  switch (shape.levels) {
    case Levels::kE2M1: return code & 8 ? -kSizes[code & 7] : kSizes[code & 7];
    case Levels::kE4M3: return to_float(Fp8{code});
    default: return shape.bits == 8 ? (float)(int8_t)code : (float)code;
  }
}

// Writes the values of a group to `to`.
inline void group_values(int kind, const FileGroup& from, float* to) {
  const BlockShape shape = shape_of(kind);
  if (shape.is_scaled) {
    for (int i = 0; i < shape.group; ++i)
      to[i] = (level_of(shape, from.codes[i]) - from.wide_zero) * from.wide_scale;
    return;
  }
  const float scale = to_float(from.scale) * (float)from.factor;
  float minimum = 0.0f;
  if (shape.has_minimum) minimum = to_float(from.minimum) * (float)from.minimum_factor;
  if (shape.is_super) minimum = -minimum;
  for (int i = 0; i < shape.group; ++i) {
    const int code = shape.bits == 8 ? (int8_t)from.codes[i] : from.codes[i] - shape.zero;
    const float value = scale * (float)code;
    to[i] = shape.has_minimum ? value + minimum : value;
  }
}

// Mirrors `FileRows` of engine/cpu/block_panels.py: rows of blocks in a file.
struct FileRows {
  const uint8_t* at;
  int64_t row_bytes;
  int32_t kind;
  int32_t inputs;
};

inline void row_values(const FileRows& rows, int64_t row, float* to) {
  const int group = shape_of(rows.kind).group;
  for (int g = 0; g < rows.inputs / group; ++g)
    group_values(rows.kind, read_group(rows.kind, rows.at + row * rows.row_bytes, g),
                 to + g * group);
}

// The same, rounded to bf16.
inline void row_values(const FileRows& rows, int64_t row, Bf16* to) {
  const int group = shape_of(rows.kind).group;
  float values[kMostGroupInputs];
  for (int g = 0; g < rows.inputs / group; ++g) {
    group_values(rows.kind, read_group(rows.kind, rows.at + row * rows.row_bytes, g), values);
    for (int i = 0; i < group; ++i) to[g * group + i] = to_bf16(values[i]);
  }
}

}  // namespace baton

#endif
