// Stands in for engine/native/tile_instructions.h where the CPU has no AMX: the same registers in memory
// and the same sums, bit for bit, a hundred times as slow. What AMX refuses ends the process.
//
// After the Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS: the even and the odd
// numbers of the words are summed apart by fused multiply-adds in order, from zero, and the two together
// are added to what was there; numbers that are not normal count as zeros.

#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(__AMX_BF16__)

namespace baton {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

struct SoftwareTiles {
  static constexpr int kTiles = 8, kRows = 16, kWords = 16;
  TileConfig config;
  bool is_configured = false;
  alignas(64) uint32_t words[kTiles][kRows][kWords];

  static SoftwareTiles& of_thread() {
    static thread_local SoftwareTiles tiles;
    return tiles;
  }

  static void require(bool is_met) {
    if (!is_met) __builtin_trap();
  }

  void configure(const TileConfig& wanted) {
    require(wanted.palette == 1 && wanted.start == 0);
    for (int i = 0; i < kTiles; ++i)
      require(wanted.rows[i] >= 1 && wanted.rows[i] <= kRows && wanted.row_bytes[i] >= 4 &&
              wanted.row_bytes[i] <= 4 * kWords && wanted.row_bytes[i] % 4 == 0);
    config = wanted;
    is_configured = true;
    std::memset(words, 0, sizeof words);
  }

  void load(int tile, const char* at, int64_t stride) {
    require(is_configured);
    zero(tile);
    for (int row = 0; row < config.rows[tile]; ++row)
      std::memcpy(words[tile][row], at + row * stride, config.row_bytes[tile]);
  }

  void store(int tile, char* at, int64_t stride) const {
    require(is_configured);
    for (int row = 0; row < config.rows[tile]; ++row)
      std::memcpy(at + row * stride, words[tile][row], config.row_bytes[tile]);
  }

  void zero(int tile) {
    require(is_configured);
    std::memset(words[tile], 0, sizeof words[tile]);
  }

  void multiply(int sums, int left, int right) {
    require(is_configured && config.rows[sums] == config.rows[left] &&
            config.row_bytes[sums] == config.row_bytes[right] &&
            config.row_bytes[left] == 4 * config.rows[right]);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(1u << 15 | 1u << 6 | 0x1f80);  // to and from zero, to the nearest, nothing raised
    add_products(sums, left, right);
    _mm_setcsr(before);
  }

  // Not inlined, so that all of it lies between the two changes of mode.
  __attribute__((noinline)) void add_products(int sums, int left, int right) {
    const auto even = [](__m512i x) { return (__m512)_mm512_slli_epi32(x, 16); };
    const auto odd = [](__m512i x) {
      return (__m512)_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000));
    };
    for (int row = 0; row < config.rows[sums]; ++row) {
      __m512 evens = _mm512_setzero_ps(), odds = _mm512_setzero_ps();
      for (int word = 0; word < config.rows[right]; ++word) {
        const __m512i x = _mm512_set1_epi32((int)words[left][row][word]);
        const __m512i y = _mm512_load_si512(words[right][word]);
        evens = _mm512_fmadd_ps(even(x), even(y), evens);
        odds = _mm512_fmadd_ps(odd(x), odd(y), odds);
      }
      float* to = (float*)words[sums][row];
      _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), _mm512_add_ps(evens, odds)));
    }
  }
};

inline void tile_configure(const TileConfig& config) { SoftwareTiles::of_thread().configure(config); }

inline void tile_release() { SoftwareTiles::of_thread().is_configured = false; }

template <int kRegister>
inline void tile_load(const void* at, int64_t row_bytes) {
  SoftwareTiles::of_thread().load(kRegister, (const char*)at, row_bytes);
}

template <int kRegister>
inline void tile_store(void* at, int64_t row_bytes) {
  SoftwareTiles::of_thread().store(kRegister, (char*)at, row_bytes);
}

template <int kRegister>
inline void tile_zero() {
  SoftwareTiles::of_thread().zero(kRegister);
}

template <int kSums, int kLeft, int kRight>
inline void tile_multiply() {
  SoftwareTiles::of_thread().multiply(kSums, kLeft, kRight);
}

}  // namespace baton

#endif
