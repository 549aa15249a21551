// bf16 keys and values with their bits separated, so that attention reads three quarters of them: a
// pool of pairs (paired.h) in which four bits of each exponent are stored elsewhere.
//
// A quad (upper_bytes.h) of a group in the order of pairs has its 128 lower bytes and 64 of codes
// together, and elsewhere 64 of rests. Its numbers mostly lie within sixteen exponents of each
// other: then one byte, the quad's span, determines all rests, and they are not read. Each process
// finds a span when it first reads a quad of its pool, so spans are not transferred with blocks.
// All 2^16 numbers are kept exactly.
//
// Of a block and layer the 192 bytes of all quads come first, [keys and values, heads, groups,
// quads], then all rests in the same order.

#pragma once

#include <initializer_list>

#include "attention_call.h"
#include "masked.h"
#include "upper_bytes.h"

namespace baton {

// The numbers in a pool of quads: only their size matters.
struct Split {
  uint16_t bits;
};

#if defined(BATON_PAIRS)
constexpr int kQuadTokens = kLanes;                // of a group
constexpr int kQuadDims = 2 * kQuadVectors;       // of a token, in a quad of keys
constexpr int kPairDims = kQuadVectors * kLanes;  // of two tokens, in a quad of values
constexpr int kLowBytes = 192;
constexpr int kHighBytes = 64;

// A span is the first of eight upper bytes, or says why there is none.
constexpr int kLastSpan = kLastUpper;
constexpr uint8_t kWide = 254;     // its numbers lie further apart, or it changes
constexpr uint8_t kUnknown = 255;  // nobody has looked since it was written

inline int least_byte(Bits bytes) {
#if defined(BATON_HALVES)
  const __m256i half = _mm256_min_epu8(bytes.low, bytes.high);
#else
  const __m256i half = _mm256_min_epu8(_mm512_castsi512_si256(bytes),
                                       _mm512_extracti64x4_epi64(bytes, 1));
#endif
  const __m128i quarter =
      _mm_min_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i pairs = _mm_min_epu8(quarter, _mm_srli_epi16(quarter, 8));
  return _mm_extract_epi16(_mm_minpos_epu16(_mm_and_si128(pairs, _mm_set1_epi16(0xff))), 0);
}

// The span of these upper bytes; kWide if they have none.
inline uint8_t span_of(const Uppers& upper) {
  const Bits magnitude = _mm512_set1_epi8(0x7f);
  const Bits first = _mm512_and_si512(upper.first, magnitude);
  const Bits second = _mm512_and_si512(upper.second, magnitude);
  const int least = least_byte(_mm512_min_epu8(first, second));
  const int most =
      0x7f - least_byte(_mm512_sub_epi8(magnitude, _mm512_max_epu8(first, second)));
  if (most - least >= 8) return kWide;
  return (uint8_t)(least < kLastSpan ? least : kLastSpan);
}

// The quads of a head's group.
struct Quads {
  char* low;
  char* high;
  uint8_t* spans;

  BATON_INLINE Quad read(int k) const {
    const int span = spans[k];
    if (__builtin_expect(span > kLastSpan, 0)) return read_wide(k);
    const char* at = low + k * kLowBytes;
    return with_lower(at, upper_bytes(_mm512_loadu_si512(at + 128), upper_table(span)));
  }

  // Stores the numbers of this group that `bytes` names, from four vectors: bit i stands for number
  // i of the first vectors, in the order of unpacked bytes.
  void write(int k, const Quad& from, __mmask64 bytes) const {
    const QuadBytes parts = bytes_of(from);
    char* at = low + k * kLowBytes;
    store_bytes(at, bytes, parts.lower[0]);
    store_bytes(at + 64, bytes, parts.lower[1]);
    store_bytes(at + 128, bytes, parts.codes);
    store_bytes(high + k * kHighBytes, bytes, parts.rests);
  }

 private:
  // Reads with the rests; notes the span if it is not noted yet. Several threads may do so at once.
  __attribute__((noinline)) Quad read_wide(int k) const {
    const char* at = low + k * kLowBytes;
    const Bits codes = _mm512_loadu_si512(at + 128);
    const Bits rest = _mm512_loadu_si512(high + k * kHighBytes);
    const Bits four = _mm512_set1_epi8(0x78);  // where they stand in an upper byte
    Uppers upper = upper_bytes(codes, upper_table(0));
    upper.first =
        _mm512_or_si512(upper.first, _mm512_and_si512(_mm512_slli_epi16(rest, 3), four));
    upper.second =
        _mm512_or_si512(upper.second, _mm512_and_si512(_mm512_srli_epi16(rest, 1), four));
    if (spans[k] == kUnknown) spans[k] = span_of(upper);
    return with_lower(at, upper);
  }
};

// The number of quads in a group of keys, and in one of values.
inline int quads_of(int head_dim) { return head_dim / kQuadDims; }

// The number of quads in a block, for keys and values.
inline int64_t quads_of_block(const AttentionCall& call) {
  return (int64_t)2 * call.num_kv_heads * (call.block_size / kQuadTokens) * quads_of(call.head_dim);
}

// The quads of one head's group in a block, the group of the token `offset`; of values if
// `is_value`, else of keys.
inline Quads quads_at(const AttentionCall& call, int64_t block, bool is_value, int64_t head,
                      int offset) {
  const int groups = call.block_size / kQuadTokens;
  const int64_t first = ((is_value * call.num_kv_heads + head) * groups + offset / kQuadTokens) *
                        quads_of(call.head_dim);
  const int64_t all = quads_of_block(call);
  char* at = (char*)call.pool + block * call.block_stride * (int64_t)sizeof(Split);
  return {at + first * kLowBytes, at + all * kLowBytes + first * kHighBytes,
          call.spans + block * all + first};
}

// The same group of a later head.
inline Quads later_head(const AttentionCall& call, const Quads& quads, int heads) {
  const int64_t more =
      (int64_t)heads * (call.block_size / kQuadTokens) * quads_of(call.head_dim);
  return {quads.low + more * kLowBytes, quads.high + more * kHighBytes, quads.spans + more};
}

// Writes a token's keys and values of one head.
inline void write_split_token(const AttentionCall& call, const Bf16* k, const Bf16* v, int64_t block,
                              int64_t head, int offset) {
  const int token = offset % kQuadTokens, count = quads_of(call.head_dim);
  const Quads keys = quads_at(call, block, false, head, offset);
  const __mmask64 key_bytes = (__mmask64)0x0303 << (token / 4 * 16 + token % 4 * 2);
  for (int q = 0; q < count; ++q, k += kQuadDims) {
    Quad quad;
    for (int i = 0; i < kQuadVectors; ++i) {
      int32_t word;
      std::memcpy(&word, k + 2 * i, 4);
      quad.vectors[i] = (Vec)_mm512_set1_epi32(word);
    }
    keys.write(q, quad, key_bytes);
  }
  std::memset(keys.spans, token + 1 == kQuadTokens ? kUnknown : kWide, (size_t)count);
  const int of_pair = call.head_dim / kPairDims, first = token / 2 * of_pair;
  const Quads values = quads_at(call, block, true, head, offset);
  const __mmask64 value_bytes = token % 2 == 0 ? 0x5555555555555555u : 0xaaaaaaaaaaaaaaaau;
  for (int q = 0; q < of_pair; ++q) {
    Quad quad;
    for (int i = 0; i < kQuadVectors; ++i, v += kLanes) {
      const Bits wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)v));
      quad.vectors[i] = (Vec)_mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
    }
    values.write(first + q, quad, value_bytes);
  }
  std::memset(values.spans + first, token % 2 == 1 ? kUnknown : kWide, (size_t)of_pair);
}

// Writes those of a whole group, from sixteen tokens `stride` numbers apart.
inline void write_split_group(const AttentionCall& call, const Bf16* k, const Bf16* v, int64_t stride,
                              int64_t block, int64_t head, int offset) {
  const __mmask64 all = ~(__mmask64)0;
  const Quads keys = quads_at(call, block, false, head, offset);
  for (int w = 0; w < call.head_dim / 2; w += kLanes) {
    const void* rows[kQuadTokens];
    for (int i = 0; i < kQuadTokens; ++i) rows[i] = k + i * stride + 2 * w;
    Quad quads[kLanes / kQuadVectors];
    pack_sixteen<Bf16>(rows, 0, kLanes, quads[0].vectors, 1);
    for (int q = 0; q < kLanes / kQuadVectors; ++q) keys.write(w / kQuadVectors + q, quads[q], all);
  }
  const Quads values = quads_at(call, block, true, head, offset);
  int q = 0;
  for (int i = 0; i < kQuadTokens; i += 2)
    for (int d = 0; d < call.head_dim; d += kPairDims, ++q) {
      Quad quad;
      pack_pair(v + i * stride + d, v + (i + 1) * stride + d, kPairDims, kPairDims,
                (int32_t*)quad.vectors);
      values.write(q, quad, all);
    }
  for (const Quads& written : {keys, values})
    std::memset(written.spans, kUnknown, (size_t)quads_of(call.head_dim));
}
#endif

}  // namespace baton
