// Loops over the rows and columns of accumulators, by constants.

#pragma once

#include <utility>

#include "simd.h"

namespace baton {

// Calls action(i, j) for every i < Rows and j < Columns, both constants. With plain loops, GCC
// keeps the array of accumulators in memory instead of registers, and stores all of it at every
// prefetch.
template <int Columns, class Action, int... At>
BATON_INLINE inline void for_each_of(std::integer_sequence<int, At...>, const Action& action) {
  (action(std::integral_constant<int, At / Columns>{},
          std::integral_constant<int, At % Columns>{}), ...);
}

template <int Rows, int Columns, class Action>
BATON_INLINE inline void for_each(const Action& action) {
  for_each_of<Columns>(std::make_integer_sequence<int, Rows * Columns>{}, action);
}

}  // namespace baton
