// Rounds weights to blocks of 32 integers of 4 or 5 bits, each with a scale and a minimum, for the
// least squared error. An input's importance, where given, multiplies the squares of its errors.
//
// From several first lines (value = scale * code + minimum), codes and line are fitted in turn: a code
// is the nearest to its weight, then the line is that of least squares through the codes (Lloyd's
// algorithm, with levels that are evenly spaced). The best line wins after its numbers have been rounded
// to halves. Sixteen rows are rounded at a time, a lane for each.
//
// Workers with different CPUs must hold the same weights, so nothing is fused: which multiplications and
// additions are would depend on the instruction set.

#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "file_blocks.h"

#if defined(BATON_PAIRS)

namespace baton {
namespace {

constexpr int kBlock = 32;
constexpr int kFits = 3;  // of a line to its codes

// Where a line begins: the shares of a block's range by which the lowest and the highest level lie within
// it. The first one is plain rounding.
struct Start {
  float low, high;
};
constexpr float kSixteenOf32 = -16.0f / 15;  // the highest level, if 16 of 32 levels span the range
constexpr Start kStarts[] = {{0, 0},     {-0.02f, -0.02f}, {0.03f, 0.03f}, {0.06f, 0.06f}, {0.06f, 0},
                             {0, 0.06f}, {0.12f, 0},       {0, 0.12f},     {0.1f, 0.1f},
                             {0, kSixteenOf32}};
constexpr int kStartsOf4Bits = 9;

struct Line {
  Vec scale, minimum;
};

Vec as_half(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  for (float& lane : lanes) lane = to_float(to_half(lane));
  return load(lanes);
}

// One block of each of sixteen rows.
struct Blocks {
  Vec above[kBlock];  // weights, less the least of the block
  Vec importance[kBlock];
  Vec least, range;
  Vec count, total;  // sums of `importance`, and of `above` by importance

  // Reads a block that begins at `rows`, whose rows are `inputs` apart. Lanes without a row repeat the
  // first one. All inputs are as important if `of_inputs` is null.
  void read(const Bf16* rows, int64_t inputs, int num_rows, const float* of_inputs) {
    Vec most = splat(-INFINITY), less = splat(-INFINITY);
    for (int i = 0; i < kBlock; ++i) {
      float lanes[kLanes];
      for (int row = 0; row < kLanes; ++row)
        lanes[row] = to_float(rows[(row < num_rows ? row : 0) * inputs + i]);
      above[i] = load(lanes);
      most = larger(above[i], most);
      less = larger(-above[i], less);
    }
    least = -less;
    range = most - least;
    total = count = splat(0.0f);
    for (int i = 0; i < kBlock; ++i) {
      above[i] = above[i] - least;
      importance[i] = splat(of_inputs ? of_inputs[i] : 1.0f);
      total += importance[i] * above[i];
      count += importance[i];
    }
  }
};

// The codes of a line, up to `largest`.
class Codes {
 public:
  Codes(const Line& line, float largest)
      : inverse_(select(line.scale > splat(0.0f), splat(1.0f) / line.scale, splat(0.0f))),
        begin_(line.minimum * inverse_),
        least_(splat(-largest)) {}

  BATON_INLINE Vec of(Vec above) const {
    const Vec code = larger(above * inverse_ - begin_, splat(0.0f));
    return splat(kMagic) - larger(-code, least_) - splat(kMagic);
  }

 private:
  static constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  Vec inverse_, begin_, least_;
};

// The line of least squares through the codes of `from`; `from` itself where all codes are the same.
Line fitted(const Blocks& blocks, const Line& from, float largest) {
  const Codes codes(from, largest);
  Vec sum = splat(0.0f), squares = sum, products = sum;
  for (int i = 0; i < kBlock; ++i) {
    const Vec above = blocks.above[i], code = codes.of(above);
    const Vec part = blocks.importance[i] * code;
    sum += part;
    squares += part * code;
    products += part * above;
  }
  const Vec count = blocks.count;
  const Vec scale = (count * products - sum * blocks.total) / (count * squares - sum * sum);
  const Vec minimum = (blocks.total - scale * sum) / count;
  const IntVec is_line = scale > splat(0.0f);
  return {select(is_line, scale, from.scale), select(is_line, minimum, from.minimum)};
}

Vec squared_error(const Blocks& blocks, const Line& line, float largest) {
  const Codes codes(line, largest);
  Vec sum = splat(0.0f);
  for (int i = 0; i < kBlock; ++i) {
    const Vec above = blocks.above[i];
    const Vec error = line.scale * codes.of(above) + line.minimum - above;
    sum += blocks.importance[i] * (error * error);
  }
  return sum;
}

// The best line of each row, of halves; NaN where a weight is not finite.
Line best_line(const Blocks& blocks, int bits) {
  const float largest = (float)((1 << bits) - 1);
  Vec error = splat(INFINITY);
  Line best = {splat(NAN), splat(NAN)};
  for (int i = 0; i < (bits == 4 ? kStartsOf4Bits : kStartsOf4Bits + 1); ++i) {
    const auto [low, high] = kStarts[i];
    Line line = {blocks.range * ((1 - low - high) / largest), blocks.range * low};
    for (int fits = 0;; ++fits) {
      const Line rounded = {as_half(line.scale),
                            as_half(line.minimum + blocks.least) - blocks.least};
      const Vec found = squared_error(blocks, rounded, largest);
      const IntVec is_better = found < error;
      error = select(is_better, found, error);
      best = {select(is_better, rounded.scale, best.scale),
              select(is_better, rounded.minimum, best.minimum)};
      if (fits == kFits) break;
      line = fitted(blocks, line, largest);
    }
  }
  return best;
}

// Writes a block as GGUF files have it: scale, minimum, perhaps upper bits, lower bits of the first half
// beside those of the second.
void write(float scale, float minimum, const uint8_t* codes, int bits, uint8_t* to) {
  const uint16_t halves[2] = {to_half(scale), to_half(minimum)};
  std::memcpy(to, halves, sizeof halves);
  to += sizeof halves;
  if (bits == 5) {
    uint32_t upper = 0;
    for (int i = 0; i < kBlock; ++i) upper |= (uint32_t)(codes[i] >> 4) << i;
    std::memcpy(to, &upper, sizeof upper);
    to += sizeof upper;
  }
  for (int i = 0; i < kBlock / 2; ++i)
    to[i] = (uint8_t)((codes[i] & 15) | (codes[i + kBlock / 2] & 15) << 4);
}

void round_blocks(const Blocks& blocks, int bits, int num_rows, uint8_t* to, int64_t row_bytes) {
  const Line line = best_line(blocks, bits);
  const Codes codes(line, (float)((1 << bits) - 1));
  const Vec minimum = line.minimum + blocks.least;
  uint8_t of_rows[kLanes][kBlock];
  for (int i = 0; i < kBlock; ++i) {
    float lanes[kLanes];
    store(lanes, codes.of(blocks.above[i]));
    for (int row = 0; row < num_rows; ++row) of_rows[row][i] = (uint8_t)lanes[row];
  }
  for (int row = 0; row < num_rows; ++row)
    write(line.scale[row], minimum[row], of_rows[row], bits, to + row * row_bytes);
}

}  // namespace
}  // namespace baton

using namespace baton;

// Rounds `weight` [outputs, inputs] to blocks of `kind` (Q4_1 or Q5_1), `rows` [outputs, bytes].
// `importance` [inputs] is positive, or null if all inputs are as important.
extern "C" __attribute__((visibility("default"))) void baton_round(const Bf16* weight,
                                                                   const float* importance,
                                                                   int32_t inputs, int32_t outputs,
                                                                   int32_t kind, uint8_t* rows) {
  const BlockShape shape = shape_of(kind);
  const int64_t row_bytes = (int64_t)(inputs / kBlock) * shape.bytes;
#pragma omp parallel for schedule(static)
  for (int first = 0; first < outputs; first += kLanes) {
    const int here = outputs - first < kLanes ? outputs - first : kLanes;
    for (int block = 0; block < inputs / kBlock; ++block) {
      Blocks blocks;
      blocks.read(weight + (int64_t)first * inputs + block * kBlock, inputs, here,
                  importance ? importance + block * kBlock : nullptr);
      round_blocks(blocks, shape.bits, here, rows + first * row_bytes + block * shape.bytes,
                   row_bytes);
    }
  }
}

#endif
