// AMX's instructions on the eight tile registers, by number; on a CPU without AMX, a test replaces
// this file.

#pragma once

#include <cstdint>

#include "simd.h"

#if defined(__AMX_BF16__)

namespace baton {

// The layout that `ldtilecfg` reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

BATON_INLINE inline void tile_configure(const TileConfig& config) {
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}

BATON_INLINE inline void tile_release() { asm volatile("tilerelease" ::: "memory"); }

template <int kRegister>
BATON_INLINE inline void tile_load(const void* at, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(row_bytes), "i"(kRegister) : "memory");
}

template <int kRegister>
BATON_INLINE inline void tile_store(void* at, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(row_bytes), "i"(kRegister) : "memory");
}

template <int kRegister>
BATON_INLINE inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kRegister));
}

template <int kSums, int kLeft, int kRight>
BATON_INLINE inline void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
}

}  // namespace baton

#endif
