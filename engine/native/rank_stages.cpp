// Hidden states from one pipeline stage to the next, through memory that their ranks share.
//
// One rank sends, several receive the same bytes. They pass through a ring of slots: the sender
// counts up for each slot that it has filled, a receiver for each that it has read, and a slot is
// filled again when all receivers have read it. So a stage goes on to its next step while the ring
// still holds what it has sent.

#include <algorithm>
#include <cstring>

#include "rank_lines.h"

#define BATON_EXPORT __attribute__((visibility("default")))

namespace baton {
namespace {

// Mirrors `_Call` in engine/parallel/hidden_states.py.
struct StageCall {
  void* data;
  int64_t size;           // bytes
  char* memory;           // [2 + receivers lines][slots][slot_bytes]; lines: stop, sender, receivers
  int64_t slot_bytes;
  int64_t num_slots;
  int64_t num_receivers;
  int64_t receiver;       // this one's number
  int64_t round;          // slots before these; becomes those after them
  int64_t limit_ns;       // for each wait
  int64_t waited_ns;      // grows by the time of waits
};

Line* lines_of(const StageCall& call) { return reinterpret_cast<Line*>(call.memory); }

char* slot_of(const StageCall& call) {
  const int64_t slot = call.round % call.num_slots;
  return call.memory + (2 + call.num_receivers) * kLine + slot * call.slot_bytes;
}

int32_t why_not(const StageCall& call, int64_t other) {
  return lines_of(call)->count.load() != 0 ? kStopped : (int32_t)other;
}

int32_t send(StageCall& call) {
  Line* lines = lines_of(call);
  for (int64_t start = 0; start < call.size; start += call.slot_bytes) {
    const uint32_t read = (uint32_t)(call.round + 1 - call.num_slots);
    for (int64_t each = 0; each < call.num_receivers; ++each)
      if (!await(lines[2 + each], read, lines[0], call.limit_ns, call.waited_ns))
        return why_not(call, each);
    const int64_t size = std::min(call.slot_bytes, call.size - start);
    std::memcpy(slot_of(call), static_cast<const char*>(call.data) + start, size);
    count_up(lines[1], (uint32_t)++call.round);
  }
  return kDone;
}

int32_t receive(StageCall& call) {
  Line* lines = lines_of(call);
  for (int64_t start = 0; start < call.size; start += call.slot_bytes) {
    const uint32_t sent = (uint32_t)(call.round + 1);
    if (!await(lines[1], sent, lines[0], call.limit_ns, call.waited_ns)) return why_not(call, 0);
    const int64_t size = std::min(call.slot_bytes, call.size - start);
    std::memcpy(static_cast<char*>(call.data) + start, slot_of(call), size);
    count_up(lines[2 + call.receiver], (uint32_t)++call.round);
  }
  return kDone;
}

}  // namespace
}  // namespace baton

extern "C" {

// Returns -1 when done and -2 when told to stop; otherwise the number of the receiver that has not
// answered, or 0 for the sender.
BATON_EXPORT int32_t baton_stage_send(baton::StageCall* call) { return baton::send(*call); }
BATON_EXPORT int32_t baton_stage_receive(baton::StageCall* call) { return baton::receive(*call); }

}
