// Entry points for sums and exchanges between ranks; see rank_sums.h. Each returns the ranks'
// `answer`: -1 when done and -2 when told to stop; otherwise the rank that has not answered within
// the limit.

#include "rank_sums.h"

#define BATON_EXPORT __attribute__((visibility("default")))

using namespace baton;

extern "C" {

BATON_EXPORT int64_t baton_rank_sum(RankSums* ranks, void* part, int64_t size, int32_t is_bf16) {
  if (is_bf16) add_up(*ranks, static_cast<Bf16*>(part), size);
  else add_up(*ranks, static_cast<float*>(part), size);
  return ranks->answer;
}

BATON_EXPORT int64_t baton_rank_share(RankSums* ranks, void* bytes, int64_t size) {
  share(*ranks, static_cast<char*>(bytes), size);
  return ranks->answer;
}

BATON_EXPORT int64_t baton_rank_gather(RankSums* ranks, const void* part, const int64_t* bounds,
                                       int64_t rows, void* whole) {
  gather(*ranks, static_cast<const char*>(part), bounds, rows, static_cast<char*>(whole));
  return ranks->answer;
}

// Ends all present and future waits.
BATON_EXPORT void baton_stop_ranks(char* memory) {
  reinterpret_cast<Line*>(memory)->count.store(1);
}

}
