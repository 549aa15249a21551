// Sums over the ranks of one host through memory that they share.
//
// A rank copies its part into its buffer, says so by counting up, waits until all others have counted
// up, too, and adds all buffers in the order of ranks: every rank gets the same bits. Two buffers
// alternate: a rank counts up for the next sum only after it has read all buffers of this one, so
// nobody overwrites what another still reads. A wait spins briefly, then sleeps in the kernel.

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>

#include "simd.h"

#define BATON_EXPORT __attribute__((visibility("default")))

namespace baton {
namespace {

constexpr int64_t kLine = 64;
constexpr int kSpins = 2000;
constexpr long kNapNs = 50 * 1000 * 1000;
constexpr int32_t kDone = -1, kStopped = -2;

struct alignas(kLine) Line {
  std::atomic<uint32_t> count;    // sums for which the rank's part is ready
  std::atomic<uint32_t> waiting;  // ranks that sleep until it counts up
};

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
};

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, limit, nullptr, 0);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

bool has_reached(const Line& line, uint32_t round) {
  return (int32_t)(line.count.load(std::memory_order_acquire) - round) >= 0;
}

// Wait until a rank has counted up to `round`; false after the limit or when all are to stop.
bool await(Line& line, uint32_t round, const Line& stop, int64_t limit_ns) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (has_reached(line, round)) return true;
    relax();
  }
  const int64_t deadline = now_ns() + limit_ns;
  while (now_ns() < deadline && stop.count.load(std::memory_order_relaxed) == 0) {
    line.waiting.fetch_add(1);
    const uint32_t seen = line.count.load();
    const timespec nap{0, kNapNs};
    if ((int32_t)(seen - round) < 0) futex(&line.count, FUTEX_WAIT, seen, &nap);
    line.waiting.fetch_sub(1);
    if (has_reached(line, round)) return true;
  }
  return false;
}

void count_up(Line& line, uint32_t round) {
  line.count.store(round);
  if (line.waiting.load() != 0) futex(&line.count, FUTEX_WAKE, INT_MAX, nullptr);
}

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
      if (!await(lines[1 + rank], round, lines[0], call.limit_ns))
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
