// How arithmetic treats numbers that are not normal.

#pragma once

#include "simd.h"

namespace baton {

#if defined(BATON_PAIRS)
// Within its life this thread's arithmetic takes numbers that are not normal for zeros, as dot products
// and tiles do anyway.
class NormalNumbers {
 public:
  NormalNumbers() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kToZero | kFromZero); }
  NormalNumbers(const NormalNumbers&) = delete;
  ~NormalNumbers() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kToZero = 1u << 15, kFromZero = 1u << 6;
  unsigned before_;
};
#else
class NormalNumbers {};
#endif

}  // namespace baton
