// How panels and rows of linear layers are shared out among threads.

#include <omp.h>

#include "linear.h"
#include "tiled_linear.h"
#include "vector_linear.h"

#if defined(BATON_PAIRS)

namespace baton {

#if defined(__AMX_BF16__)
using LinearWorker = TiledWorker;
constexpr int64_t kRowsByBytes = kTileRows;  // up to these, rows take as long as their panel's bytes
static_assert(kGroupAlignment == kTileRows);
#else
using LinearWorker = VectorWorker;
constexpr int64_t kRowsByBytes = kMaxRows;
#endif
constexpr int64_t kSharesPerThread = 8;  // of a grouped product: costs are estimates

// Divides the rows into so many parts, none of them empty, at the borders of groups that share what
// is loaded of a panel.
class Parts {
 public:
  Parts(int64_t rows, int64_t rows_per_part)
      : rows_(rows), groups_(count_of(rows, LinearWorker::kRowsTogether)),
        count_(count_of(rows, rows_per_part)) {
    if (count_ > groups_) count_ = groups_;
  }
  int64_t count() const { return count_; }
  int64_t begin_of(int64_t part) const {
    const int64_t row = groups_ * part / count_ * LinearWorker::kRowsTogether;
    return row < rows_ ? row : rows_;
  }

 private:
  int64_t rows_;
  int64_t groups_;
  int64_t count_;

  static int64_t count_of(int64_t rows, int64_t size) { return (rows + size - 1) / size; }
};

// Divides the work by items, each some rows of one panel.
inline void linear_by_items(const LinearCall& call, int first, int end, LinearWorker& worker) {
  const Parts parts(call.rows, kRowsPerItem);
  const int64_t chunks = parts.count(), items = (end - first) * chunks;
#pragma omp for schedule(guided)
  for (int64_t item = 0; item < items; ++item) {
    const int64_t chunk = item % chunks, begin = parts.begin_of(chunk);
    worker.work(call, {first + (int)(item / chunks), begin,
                       (int)(parts.begin_of(chunk + 1) - begin), (int)chunk, (int)chunks});
  }
}

// Divides the work by blocks of rows. Each thread begins with its own block, whose rows it wrote in
// the stage before and which stay in its second cache while panel after panel is read. Then it
// helps with the blocks of other threads.
inline void linear_by_blocks(const LinearCall& call, int first, int end, int64_t rows_per_block,
                             LinearWorker& worker) {
  constexpr int kLine = 64 / sizeof(int32_t);
  const Parts parts(call.rows, rows_per_block);
  const int64_t blocks = parts.count();
  int32_t* next = nullptr;  // panel of each block, on a cache line of its own
#pragma omp single copyprivate(next)
  {
    static thread_local Arena arena;
    arena.reserve((size_t)blocks * 64);
    next = (int32_t*)arena.data();
    for (int64_t block = 0; block < blocks; ++block) next[block * kLine] = first;
  }
  const int64_t own = blocks * omp_get_thread_num() / omp_get_num_threads();
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t block = (own + i) % blocks, begin = parts.begin_of(block);
    const int rows = (int)(parts.begin_of(block + 1) - begin);
    for (;;) {
      int32_t panel;
#pragma omp atomic capture
      panel = next[block * kLine]++;
      if (panel >= end) break;
      worker.work(call, {panel, begin, rows, 0, 1});
    }
  }
#pragma omp barrier
}

void linear_part(const LinearCall& call, int first, int end) {
  LinearWorker worker(call);
  const int64_t rows_per_block = LinearWorker::rows_per_block(call);
  if (rows_per_block > 0) linear_by_blocks(call, first, end, rows_per_block, worker);
  else linear_by_items(call, first, end, worker);
}

// The work of a grouped product, divided by its costs: a group of few rows costs its panels' bytes,
// any other its products.
class GroupedWork {
 public:
  explicit GroupedWork(const GroupedCall& call) : call_(call), panels_(num_panels(call.weights[0])) {
    for (int group = 0; group < call.groups; ++group) cost_ += cost_of(group);
  }

  // Does share number `share` of `shares` equal ones.
  void run(int64_t share, int64_t shares, LinearWorker& worker) const {
    const int64_t begin = cost_ * share / shares, end = cost_ * (share + 1) / shares;
    int64_t before = 0;  // the cost of earlier groups
    for (int group = 0; group < call_.groups && before < end; ++group) {
      const int64_t cost = cost_of(group);
      if (cost > 0 && before + cost > begin)
        run_items(group, begin - before, end - before, cost, worker);
      before += cost;
    }
  }

 private:
  const GroupedCall& call_;
  int panels_;
  int64_t cost_ = 0;

  int64_t cost_of(int group) const {
    const int64_t rows = call_.counts[group];
    if (rows == 0) return 0;
    return panels_ * (rows < kRowsByBytes ? kRowsByBytes : rows);
  }

  // A group's items (some rows of one panel) that begin between two points of its cost.
  void run_items(int group, int64_t begin, int64_t end, int64_t cost, LinearWorker& worker) const {
    const int64_t rows = call_.counts[group], row = call_.begins[group];
    const Parts parts(rows, kRowsPerItem);
    const int64_t chunks = parts.count(), items = panels_ * chunks;
    const auto item_at = [&](int64_t point) {
      if (point <= 0) return (int64_t)0;
      return point >= cost ? items : (point * items + cost - 1) / cost;
    };
    const LinearCall call{call_.weights[group], call_.x, nullptr, call_.out, nullptr, rows,
                          call_.num_threads};
    for (int64_t item = item_at(begin); item < item_at(end); ++item) {
      const int64_t chunk = item % chunks, first = parts.begin_of(chunk);
      worker.work(call, {(int)(item / chunks), row + first, (int)(parts.begin_of(chunk + 1) - first),
                         (int)chunk, (int)chunks});
    }
  }
};

void grouped_linear(const GroupedCall& call) {
  LinearWorker worker({call.weights[0], call.x, nullptr, call.out, nullptr, call.rows,
                       call.num_threads});
  const GroupedWork work(call);
  const int64_t shares = kSharesPerThread * omp_get_num_threads();
#pragma omp for schedule(dynamic)
  for (int64_t share = 0; share < shares; ++share) work.run(share, shares, worker);
}

}  // namespace baton

#endif
