// Packs a tile of 64 keys and its values from the pool into the order of the products: keys one per
// lane, values one row per key, in fp32 or as pairs of bf16, which hold e4m3 exactly.

#pragma once

#include "masked.h"
#include "transpose.h"
#include "words.h"

namespace baton {

constexpr int kTileKeys = 64;
constexpr int kTileColumns = kTileKeys / kLanes;

// Converts some numbers of a head to the type of the pool's numbers.
template <class T>
void copy_head(const T* from, int head_dim, T* to) {
  std::memcpy(to, from, (size_t)head_dim * sizeof(T));
}

template <class T>
void copy_head(const T* from, int head_dim, Fp8* to) {
  int d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(to + d, load(from + d));
  if (d < head_dim) store_some(to + d, load_some(from + d, head_dim - d), head_dim - d);
}

// Packs rows of q into words, with zeros up to the padded head.
template <class T>
void pack_query(const T* from, int head_dim, int padded, float* to) {
  for (int d = 0; d < head_dim; ++d) to[d] = to_float(from[d]);
  for (int d = head_dim; d < padded; ++d) to[d] = 0;
}

// Packs 64 keys, one per lane: word w of all keys is row w of `to`.
template <class T>
void pack_keys(const void* const* rows, Ahead ahead, int head_dim, float* to) {
  const unsigned asked = ahead.in_steps(kTileKeys);
#if defined(BATON_PAIRS)
  if (sizeof(T) == 4) {
    for (int j = 0; j < kTileColumns; ++j) {
      ahead.ask(kLanes * asked);
      for (int d = 0; d < head_dim; d += 16)
        transpose_words(rows + j * kLanes, (size_t)d * 4, head_dim - d < 16 ? head_dim - d : 16,
                        (Vec*)to + d * kTileColumns + j, kTileColumns);
    }
    return;
  }
#endif
  for (int j = 0; j < kTileKeys; ++j) {
    ahead.ask(asked);
    for (int d = 0; d < head_dim; ++d) to[d * kTileKeys + j] = to_float(((const T*)rows[j])[d]);
  }
}

template <class T>
void pack_values(const void* const* rows, Ahead ahead, int head_dim, int padded, float* to) {
  const unsigned asked = ahead.in_steps(kTileKeys);
  for (int j = 0; j < kTileKeys; ++j) {
    ahead.ask(asked);
    const T* row = (const T*)rows[j];
    int d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) store(to + j * padded + d, load(row + d));
    if (d < head_dim) store(to + j * padded + d, load_some(row + d, head_dim - d));
  }
}

inline void store_weights(float* to, const Vec (&weights)[kTileColumns]) {
  for (int j = 0; j < kTileColumns; ++j) store(to + j * kLanes, weights[j]);
}

#if defined(BATON_PAIRS)
// Packs `count` numbers of a row (an even count) as the left side of pairs.
#if defined(__AVX512BF16__)
inline void pack_left(const Bf16* from, int64_t count, int32_t* to) {
  std::memcpy(to, from, (size_t)count * 2);
}

inline void store_weights(int32_t* to, const Vec (&weights)[kTileColumns]) {
  for (int j = 0; j < kTileColumns; j += 2)
    store_as(to + j * kLanes / 2, to_bf16(weights[j], weights[j + 1]));
}
#else
// Swaps each two neighbours.
inline Vec swapped(Vec x) {
#if defined(BATON_HALVES)
  return {_mm256_permute_ps(x.low, 0xb1), _mm256_permute_ps(x.high, 0xb1)};
#else
  return (Vec)_mm512_permute_ps((Floats)x, 0xb1);
#endif
}

inline void pack_left(const Bf16* from, int64_t count, HalfPair* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_as(to + i, swapped(load(from + i)));
  for (; i < count; ++i) to[i ^ 1].number = to_float(from[i]);
}

inline void store_weights(HalfPair* to, const Vec (&weights)[kTileColumns]) {
  for (int j = 0; j < kTileColumns; ++j)
    store_as(to + j * kLanes, swapped((Vec)round_to_bf16(weights[j])));
}
#endif

inline void pack_query(const Bf16* from, int head_dim, int padded, PairType* to) {
  pack_left(from, head_dim, to);
  const int words = head_dim / PairWord::kPerWord;
  std::memset((void*)(to + words), 0, (size_t)(padded - head_dim) / PairWord::kPerWord * sizeof *to);
}

// The words of sixteen keys from word `w` on, at most sixteen of them: word by word, `stride` vectors
// apart.
template <class T>
void pack_sixteen(const void* const* rows, int w, int words, Vec* to, int stride) {
  const int count = words - w < kLanes ? words - w : kLanes;
  const __mmask32 mask = (__mmask32)((1ull << 2 * count) - 1);
  Bits pairs[kLanes];
  for (int i = 0; i < kLanes; ++i) pairs[i] = load_pairs(mask, (const T*)rows[i] + 2 * w);
  transpose(pairs, count, to, stride);
}

template <class T>
void pack_keys(const void* const* rows, Ahead ahead, int head_dim, PairType* to) {
  const int words = head_dim / 2, steps = (words + 15) / 16;
  const unsigned asked = ahead.in_steps(kTileColumns * steps);
  for (int j = 0; j < kTileColumns; ++j)
    for (int step = 0; step < steps; ++step) {
      ahead.ask(asked);
      const int first = step * kLanes, count = words - first < kLanes ? words - first : kLanes;
      Vec pairs[kLanes];
      pack_sixteen<T>(rows + j * kLanes, first, words, pairs, 1);
      for (int w = 0; w < count; ++w)
        store_parts(pairs[w], (Vec*)to + (first + w) * PairWord::kPasses * kTileColumns + j,
                    kTileColumns);
    }
}

// Sixteen numbers of each, from number kFirst on, in pairs.
template <int kFirst>
inline Bits pairs_of(Bits even, Bits odd) {
#if defined(BATON_HALVES)
  const __m256i a = kFirst == 0 ? even.low : even.high, b = kFirst == 0 ? odd.low : odd.high;
  const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
  return {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
#else
  alignas(64) static constexpr uint16_t kLow[32] = {
      0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const Bits low = _mm512_load_si512(kLow);
  return _mm512_permutex2var_epi16(even, _mm512_add_epi16(low, _mm512_set1_epi16(kFirst)), odd);
#endif
}

// The values of two keys, one pair of each dimension after the other.
template <class T>
void pack_pair(const T* first, const T* second, int head_dim, int padded, int32_t* to) {
  for (int d = 0; d < padded; d += 32) {
    const int count = head_dim - d;
    const __mmask32 mask = count >= 32 ? 0xffffffffu : (__mmask32)((1ull << count) - 1);
    const Bits even = load_pairs(mask, first + d), odd = load_pairs(mask, second + d);
    _mm512_storeu_si512(to + d, pairs_of<0>(even, odd));
    if (d + 16 < padded) _mm512_storeu_si512(to + d + 16, pairs_of<16>(even, odd));
  }
}

template <class T>
void pack_values(const void* const* rows, Ahead ahead, int head_dim, int padded, PairType* to) {
  const unsigned asked = ahead.in_steps(kTileKeys / 2);
  const int vectors = padded / kLanes;
  for (int j = 0; j < kTileKeys; j += 2) {
    ahead.ask(asked);
    Vec* row = (Vec*)to + j / 2 * PairWord::kPasses * vectors;
    pack_pair((const T*)rows[j], (const T*)rows[j + 1], head_dim, padded, (int32_t*)row);
    if constexpr (PairWord::kPasses == 2)
      for (int i = 0; i < vectors; ++i) store_parts(row[i], row + i, vectors);
  }
}
#endif

}  // namespace baton
