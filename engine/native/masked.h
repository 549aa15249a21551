// Some numbers of a vector: those whose bits are set in a mask.

#pragma once

#include "simd.h"

#if defined(BATON_PAIRS)

namespace baton {

#if defined(BATON_HALVES)
// AVX2 has no masks of 32 numbers: one number after the other, unless all are named.
constexpr __mmask32 kAll = 0xffffffffu;

// Of 32 numbers the named ones, zeros for the others.
inline Bits keep(__mmask32 mask, Bits x) {
  if (mask == kAll) return x;
  uint16_t numbers[32];
  std::memcpy(numbers, &x, sizeof numbers);
  for (int i = 0; i < 32; ++i) numbers[i] = mask >> i & 1 ? numbers[i] : 0;
  return load_as<Bits>(numbers);
}

template <class T>
inline void copy_named(__mmask32 mask, const T* from, T* to) {
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) to[i] = from[i];
}

// The named ones of the 32 numbers at `at` as bf16, zeros for the others: exact. No others are read.
inline Bits load_pairs(__mmask32 mask, const Bf16* at) {
  if (mask == kAll) return load_as<Bits>(at);
  Bf16 numbers[32] = {};
  copy_named(mask, at, numbers);
  return load_as<Bits>(numbers);
}

inline Bits load_pairs(__mmask32 mask, const Fp8* at) {
  static constexpr NumberTable kSmall({0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60});
  Fp8 some[32] = {};
  if (mask != kAll) copy_named(mask, at, some);
  const Bits x =
      _mm512_cvtepu8_epi16(load_as<__m256i>(mask == kAll ? (const void*)at : (const void*)some));
  const Bits magnitude = x & _mm512_set1_epi16(0x7f);
  const Bits normal =
      _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  const Bits is_small = greater_16(_mm512_set1_epi16(8), magnitude);  // multiples of 2^-9
  const Bits is_nan = equal_16(magnitude, _mm512_set1_epi16(0x7f));
  const Bits bits = (is_small & kSmall.look_up(magnitude)) | (~is_small & normal);
  const Bits number = (is_nan & _mm512_set1_epi16(0x7fc0)) | (~is_nan & bits);
  return number | _mm512_slli_epi16(_mm512_xor_si512(x, magnitude), 8);
}

// Of 64 bytes the named ones to memory, and no others: somebody else may write them.
inline void store_bytes(char* to, __mmask64 mask, Bits bytes) {
  if (mask == ~(__mmask64)0) return _mm512_storeu_si512(to, bytes);
  char from[64];
  _mm512_storeu_si512(from, bytes);
  for (; mask != 0; mask &= mask - 1) to[__builtin_ctzll(mask)] = from[__builtin_ctzll(mask)];
}
#else
// Of 32 numbers the named ones, zeros for the others.
inline Bits keep(__mmask32 mask, Bits x) { return _mm512_maskz_mov_epi16(mask, x); }

// The named ones of the 32 numbers at `at` as bf16, zeros for the others: exact. No others are read.
inline Bits load_pairs(__mmask32 mask, const Bf16* at) {
  return _mm512_maskz_loadu_epi16(mask, at);
}

inline Bits load_pairs(__mmask32 mask, const Fp8* at) {
  alignas(64) static constexpr uint16_t kSmall[32] = {  // multiples of 2^-9
      0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const Bits x = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, at));
  const Bits magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
  const Bits normal =
      _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
  const Bits bits = _mm512_mask_permutexvar_epi16(normal, is_small, magnitude,
                                                  _mm512_load_si512(kSmall));
  const Bits number = _mm512_mask_mov_epi16(bits, is_nan, _mm512_set1_epi16(0x7fc0));
  return _mm512_or_si512(number, _mm512_slli_epi16(_mm512_xor_si512(x, magnitude), 8));
}

// Of 64 bytes the named ones to memory, and no others: somebody else may write them.
inline void store_bytes(char* to, __mmask64 mask, Bits bytes) {
  _mm512_mask_storeu_epi8(to, mask, bytes);
}
#endif

}  // namespace baton

#endif
