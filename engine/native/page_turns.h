// How a core reads from memory what it streams once, such as a panel of weights.

#pragma once

#include <cstdint>

#include "simd.h"

namespace baton {

constexpr uintptr_t kPageBytes = 4096;
constexpr uintptr_t kPagesInTurn = 8;

// Asks for what is read in order by turns of several pages: a line of each, the next one of each, and
// so on, block after block. The prefetcher of a core follows every page by itself, so that more lines
// are on their way than of one page after the other.
class PageTurns {
 public:
  // `at` is what is read first.
  explicit PageTurns(const char* at) : at_((uintptr_t)at) {}

  // So many lines more are being read: for the second cache as many of the next block of pages, one
  // for one.
  BATON_INLINE void ask(int lines) {
    for (int i = 0; i < lines; ++i, at_ += kLine) {
      const uintptr_t line = at_ % kBlock / kLine;
      const uintptr_t place = line % kPagesInTurn * kPageBytes + line / kPagesInTurn * kLine;
      __builtin_prefetch((const void*)(at_ - at_ % kBlock + kBlock + place), 0, 2);
    }
  }

 private:
  static constexpr uintptr_t kLine = 64, kBlock = kPagesInTurn * kPageBytes;
  uintptr_t at_;
};

}  // namespace baton
