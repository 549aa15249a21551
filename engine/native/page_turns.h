// Prefetches what a core streams from memory in order, such as weights, from several pages in turn:
// a line of each, then the next line of each, and so on. The core's prefetcher follows every page
// by itself, so that more lines are under way than with one page after the other.

#pragma once

#include <cstdint>

#include "simd.h"

namespace baton {

constexpr int kForSecondCache = 2;  // of __builtin_prefetch

class PageTurns {
 public:
  // `at` is what is read first.
  explicit PageTurns(const char* at) : at_((uintptr_t)at) {}

  // `lines` more are being read: prefetches as many of the next block of pages into the second
  // cache, because the first could not hold them all.
  BATON_INLINE void ask(int lines) {
    for (int i = 0; i < lines; ++i, at_ += kLine) {
      const uintptr_t line = at_ % kBlock / kLine;
      const uintptr_t place = line % kPages * kPage + line / kPages * kLine;
      __builtin_prefetch((const void*)(at_ - at_ % kBlock + kBlock + place), 0, kForSecondCache);
    }
  }

 private:
  static constexpr uintptr_t kLine = 64, kPage = 4096, kPages = 8, kBlock = kPages * kPage;
  uintptr_t at_;
};

}  // namespace baton
