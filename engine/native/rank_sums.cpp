// Sums over the ranks of one host through memory that they share.
//
// A rank copies its part into its buffer, says so by counting up, waits until all others have counted
// up, too, and adds all buffers in the order of ranks: every rank gets the same bits. Two buffers
// alternate: a rank counts up for the next sum only after it has read all buffers of this one, so
// nobody overwrites what another still reads.

#include <algorithm>
#include <cstring>

#include "rank_lines.h"
#include "simd.h"

#define BATON_EXPORT __attribute__((visibility("default")))

namespace baton {
namespace {

// Mirrors `_Call` in engine/parallel/sums.py.
struct SumCall {
  void* data;         // the rank's part; becomes the sum
  int64_t size;       // numbers
  int64_t is_bf16;    // else fp32
  char* memory;       // [1 + ranks lines][2 buffers][ranks][buffer_bytes]
  int64_t buffer_bytes;
  int64_t rank;
  int64_t num_ranks;
  int64_t round;      // sums before this one; becomes those after it
  int64_t limit_ns;   // for each wait
  int64_t waited_ns;  // grows by the time of waits
};

template <class T>
T rounded(float x);
template <>
float rounded<float>(float x) {
  return x;
}
template <>
Bf16 rounded<Bf16>(float x) {
  return to_bf16(x);
}

template <class T>
void add_buffers(T* out, const char* buffers, int64_t buffer_bytes, int64_t num_ranks,
                 int64_t size) {
  const T* first = reinterpret_cast<const T*>(buffers);
  for (int64_t i = 0; i < size; ++i) {
    float sum = to_float(first[i]);
    for (int64_t rank = 1; rank < num_ranks; ++rank)
      sum += to_float(reinterpret_cast<const T*>(buffers + rank * buffer_bytes)[i]);
    out[i] = rounded<T>(sum);
  }
}

template <class T>
int32_t add_up(SumCall& call) {
  Line* lines = reinterpret_cast<Line*>(call.memory);  // the first says when to stop
  char* buffers = call.memory + (1 + call.num_ranks) * kLine;
  const int64_t most = call.buffer_bytes / (int64_t)sizeof(T);
  for (int64_t start = 0; start < call.size; start += most) {
    const int64_t size = std::min(most, call.size - start);
    T* part = static_cast<T*>(call.data) + start;
    char* now = buffers + (call.round % 2) * call.num_ranks * call.buffer_bytes;
    const uint32_t round = (uint32_t)++call.round;
    std::memcpy(now + call.rank * call.buffer_bytes, part, size * sizeof(T));
    count_up(lines[1 + call.rank], round);
    for (int64_t rank = 0; rank < call.num_ranks; ++rank)
      if (!await(lines[1 + rank], round, lines[0], call.limit_ns, call.waited_ns))
        return lines[0].count.load() != 0 ? kStopped : (int32_t)rank;
    add_buffers(part, now, call.buffer_bytes, call.num_ranks, size);
  }
  return kDone;
}

}  // namespace
}  // namespace baton

extern "C" {

// -1: done. -2: told to stop. Else the rank that has not answered within the limit.
BATON_EXPORT int32_t baton_rank_sum(baton::SumCall* call) {
  return call->is_bf16 ? baton::add_up<baton::Bf16>(*call) : baton::add_up<float>(*call);
}

// Make all waits end, now and from now on.
BATON_EXPORT void baton_stop_ranks(char* memory) {
  reinterpret_cast<baton::Line*>(memory)->count.store(1);
}

}
