// Counters in memory that the ranks of one host share, and waiting for them.
//
// A rank counts up what it has done; others wait until its count has reached a number. A wait spins
// briefly, then offers its core to others, and sleeps in the kernel only after that. Ranks that
// sleep between the sums of a step would wake each other up by turns: on a virtual machine whose
// cores halt, each time takes longer than a layer.

#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace baton {
namespace {

constexpr int64_t kLine = 64;
constexpr int kSpins = 1000;
constexpr int64_t kYieldNs = 1000 * 1000;
constexpr long kNapNs = 50 * 1000 * 1000;
constexpr int32_t kDone = -1, kStopped = -2;

struct alignas(kLine) Line {
  std::atomic<uint32_t> count;    // what the rank has done
  std::atomic<uint32_t> waiting;  // ranks that sleep until it counts up
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

bool await_asleep(Line& line, uint32_t round, const Line& stop, int64_t deadline) {
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

// Waits until a rank has counted up to `round`; returns false after the limit, or when all ranks
// are told to stop. Adds the time to `waited_ns`.
bool await(Line& line, uint32_t round, const Line& stop, int64_t limit_ns, int64_t& waited_ns) {
  if (has_reached(line, round)) return true;
  const int64_t started = now_ns();
  bool reached = false;
  for (int spin = 0; spin < kSpins && !reached; ++spin) {
    relax();
    reached = has_reached(line, round);
  }
  while (!reached && now_ns() < started + kYieldNs) {
    sched_yield();
    reached = has_reached(line, round);
  }
  if (!reached) reached = await_asleep(line, round, stop, started + limit_ns);
  waited_ns += now_ns() - started;
  return reached;
}

void count_up(Line& line, uint32_t round) {
  line.count.store(round);
  if (line.waiting.load() != 0) futex(&line.count, FUTEX_WAKE, INT_MAX, nullptr);
}

}  // namespace
}  // namespace baton
