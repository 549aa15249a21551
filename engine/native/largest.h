// The largest number of each row, and its index.

#pragma once

#include <cmath>
#include <limits>

#include "simd.h"

namespace baton {

// Mirrors `_LargestCall` in row_argmax.py.
struct LargestCall {
  const float* x;   // [rows, size]
  float* values;    // [rows]: NaN where a row has one
  int64_t* places;  // [rows]: of the first that is the row's value
  int64_t rows;
  int64_t size;
  int32_t num_threads;
};

// The first i < size for which `is_it` holds for x[i]; `is_it` judges 16 numbers at a time, lane by
// lane.
template <class IsIt>
int64_t first_place(const float* x, int64_t size, const IsIt& is_it) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    if (any(is_it(load(x + i)))) break;
  }
  while (i < size && !is_it(splat(x[i]))[0]) ++i;
  return i;
}

inline void find_largest(const LargestCall& call, int64_t row) {
  const float* x = call.x + row * call.size;
  Vec top = splat(-std::numeric_limits<float>::infinity());
  IntVec is_odd{};
  int64_t i = 0;
  for (; i + kLanes <= call.size; i += kLanes) {
    const Vec next = load(x + i);
    is_odd |= next != next;
    top = larger(next, top);
  }
  for (; i < call.size; ++i) {
    const Vec next = splat(x[i]);
    is_odd |= next != next;
    top = larger(next, top);
  }
  const bool any_odd = any(is_odd);
  const float value = any_odd ? std::numeric_limits<float>::quiet_NaN() : largest(top);
  call.values[row] = value;
  call.places[row] =
      any_odd ? first_place(x, call.size, [](Vec v) -> IntVec { return v != v; })
              : first_place(x, call.size, [=](Vec v) -> IntVec { return v == splat(value); });
}

}  // namespace baton
