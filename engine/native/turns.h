// Lines that a core streams from memory, asked for by turns of several pages: a line of each, the next
// one of each, and so on. Its prefetcher follows every page by itself, so that more lines are on their way
// than of one page after the other. They are for the second cache: what is asked for is too much for the
// first, and a wait for the second is short enough to compute on.

#pragma once

#include <cstdint>

#include "simd.h"

namespace baton {

constexpr int kForSecondCache = 2;  // of __builtin_prefetch

// What lies in one piece and is read in order, such as weights.
class PageTurns {
 public:
  // `at` is what is read first.
  explicit PageTurns(const char* at) : at_((uintptr_t)at) {}

  // So many lines more are being read: asks for as many of the next block of pages, one for one.
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

// Rows that lie anywhere, such as keys and values.
class RowTurns {
 public:
  RowTurns() = default;
  // Lines `begin` to `end` of all rows, of which each has `per_row`; `at_once` rows take turns, then as
  // many others.
  RowTurns(const void* const* rows, int at_once, int begin, int end, int per_row)
      : left_(end - begin), at_once_(at_once), row_bytes_(per_row * kLine) {
    if (left_ == 0) return;
    const int lines = at_once * per_row;
    rows_ = rows + begin / lines * at_once;
    offset_ = begin % lines / at_once * kLine;
    turn_ = begin % at_once;
  }

  // How many in each of so many steps.
  int in_steps(int steps) const { return (left_ + steps - 1) / steps; }

  BATON_INLINE void ask(int count) {
    if (count > left_) count = left_;
    left_ -= count;
    for (; count > 0; --count) {
      __builtin_prefetch((const char*)rows_[turn_] + offset_, 0, kForSecondCache);
      if (++turn_ < at_once_) continue;
      turn_ = 0;
      offset_ += kLine;
      if (offset_ < row_bytes_) continue;
      offset_ = 0;
      rows_ += at_once_;
    }
  }

 private:
  static constexpr int kLine = 64;
  int left_ = 0;
  int at_once_ = 0;
  int turn_ = 0;
  int offset_ = 0;
  int row_bytes_ = 0;
  const void* const* rows_ = nullptr;
};

}  // namespace baton
