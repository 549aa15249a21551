// Sums and exchanges between the ranks of one host, through memory that they share.
//
// In a round, a rank writes into its buffer and then counts up. It waits until all others have
// counted up, too, and reads their buffers. Two buffers alternate, and a rank counts up for the
// next round only after it has read this one, so nobody overwrites what another rank still reads.
// Sums are in fp32, in the order of ranks: every rank gets the same bits.

#pragma once

#include <algorithm>
#include <cstring>

#include "rank_lines.h"
#include "simd.h"

namespace baton {

// Mirrors `_Ranks` in engine/parallel/sums.py.
struct RankSums {
  char* memory;          // [1 + ranks lines][2 buffers][ranks][buffer_bytes]
  int64_t buffer_bytes;
  int64_t rank;
  int64_t num_ranks;
  int64_t round;         // rounds so far
  int64_t limit_ns;      // for each wait
  int64_t waited_ns;     // grows by the time of waits
  int64_t answer;        // kDone; else that of the first wait that failed: then no round does anything
};

// Runs a round: `put` fills this rank's buffer, `take` reads the buffers of all ranks, one after
// the other.
template <class Put, class Take>
void run_round(RankSums& ranks, const Put& put, const Take& take) {
  if (ranks.answer != kDone) return;
  Line* lines = reinterpret_cast<Line*>(ranks.memory);  // the first says when to stop
  char* buffers = ranks.memory + (1 + ranks.num_ranks) * kLine;
  buffers += (ranks.round % 2) * ranks.num_ranks * ranks.buffer_bytes;
  const uint32_t round = (uint32_t)++ranks.round;
  put(buffers + ranks.rank * ranks.buffer_bytes);
  count_up(lines[1 + ranks.rank], round);
  for (int64_t rank = 0; rank < ranks.num_ranks; ++rank)
    if (!await(lines[1 + rank], round, lines[0], ranks.limit_ns, ranks.waited_ns)) {
      ranks.answer = lines[0].count.load() != 0 ? kStopped : rank;
      return;
    }
  take(buffers);
}

template <class T>
void add_buffers(const RankSums& ranks, const char* buffers, int64_t size, T* out) {
  const auto of_rank = [&](int64_t rank) {
    return reinterpret_cast<const T*>(buffers + rank * ranks.buffer_bytes);
  };
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    Vec sum = load(of_rank(0) + i);
    for (int64_t rank = 1; rank < ranks.num_ranks; ++rank) sum += load(of_rank(rank) + i);
    store(out + i, sum);
  }
  if (const int count = (int)(size - i); count > 0) {
    Vec sum = load_some(of_rank(0) + i, count);
    for (int64_t rank = 1; rank < ranks.num_ranks; ++rank)
      sum += load_some(of_rank(rank) + i, count);
    store_some(out + i, sum, count);
  }
}

// Replaces the rank's part [size] by the sum of all ranks' parts.
template <class T>
void add_up(RankSums& ranks, T* part, int64_t size) {
  const int64_t most = ranks.buffer_bytes / (int64_t)sizeof(T);
  for (int64_t start = 0; start < size; start += most) {
    const int64_t count = std::min(most, size - start);
    T* at = part + start;
    run_round(
        ranks, [&](char* own) { std::memcpy(own, at, count * sizeof(T)); },
        [&](const char* buffers) { add_buffers(ranks, buffers, count, at); });
  }
}

// Copies the first rank's bytes to all ranks.
inline void share(RankSums& ranks, char* bytes, int64_t size) {
  for (int64_t start = 0; start < size; start += ranks.buffer_bytes) {
    const int64_t count = std::min(ranks.buffer_bytes, size - start);
    run_round(
        ranks,
        [&](char* own) {
          if (ranks.rank == 0) std::memcpy(own, bytes + start, count);
        },
        [&](const char* buffers) {
          if (ranks.rank != 0) std::memcpy(bytes + start, buffers, count);
        });
  }
}

// Puts the ranks' parts of rows side by side into the first rank's rows: rank r has the bytes from
// `bounds[r]` to `bounds[r + 1]` of each row, and `part` is [rows, these bytes].
inline void gather(RankSums& ranks, const char* part, const int64_t* bounds, int64_t rows,
                   char* whole) {
  int64_t widest = 1;
  for (int64_t rank = 0; rank < ranks.num_ranks; ++rank)
    widest = std::max(widest, bounds[rank + 1] - bounds[rank]);
  const int64_t width = std::min(widest, ranks.buffer_bytes);  // of a row, in a round
  const int64_t at_once = std::max<int64_t>(1, ranks.buffer_bytes / width);
  const int64_t row_bytes = bounds[ranks.num_ranks] - bounds[0];
  for (int64_t row = 0; row < rows; row += at_once)
    for (int64_t first = 0; first < widest; first += width) {
      const int64_t end = std::min(rows, row + at_once);
      const auto columns = [&](int64_t rank) {
        return std::clamp<int64_t>(bounds[rank + 1] - bounds[rank] - first, 0, width);
      };
      const int64_t own_bytes = bounds[ranks.rank + 1] - bounds[ranks.rank];
      const auto put = [&](char* own) {
        for (int64_t r = row; ranks.rank != 0 && r < end; ++r)
          std::memcpy(own + (r - row) * width, part + r * own_bytes + first, columns(ranks.rank));
      };
      run_round(ranks, put, [&](const char* buffers) {
        for (int64_t rank = 0; ranks.rank == 0 && rank < ranks.num_ranks; ++rank)
          for (int64_t r = row; r < end; ++r) {
            const char* from = rank == 0 ? part + r * own_bytes + first
                                         : buffers + rank * ranks.buffer_bytes + (r - row) * width;
            std::memcpy(whole + r * row_bytes + bounds[rank] - bounds[0] + first, from,
                        columns(rank));
          }
      });
    }
}

}  // namespace baton
