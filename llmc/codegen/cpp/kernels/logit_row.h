// A row of logits in blocks, by whose largest ones a choice passes over most of it: the likeliest token, and a draw.
//
// The row may be a part of one, that of a rank: `first` is the id of its first token, by which noise goes.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "activation.h"
#include "gumbel_noise.h"
#include "row.h"

namespace llmc {

constexpr int64_t kLogitBlock = 512;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct LogitBlock {
  float largest;
  float sum;
};

// One row, its numbers, and what was found out about it.
struct LogitRow {
  const float* logits;
  int64_t vocabulary;
  float per_temperature;
  const LogitBlock* blocks;
  float largest;
  double total;  // Σ weights; a token's weight is e^((logit - largest) / temperature)

  static int64_t blocks_of(int64_t vocabulary) { return (vocabulary + kLogitBlock - 1) / kLogitBlock; }
  int64_t begin(int64_t block) const { return block * kLogitBlock; }
  int64_t end(int64_t block) const { return std::min(vocabulary, (block + 1) * kLogitBlock); }
  // A logit whose weight is this, or a little less.
  float logit_of(float weight) const {
    return weight <= 0.0f ? -kInfinity : largest + (std::log(weight) - 1e-3f) / per_temperature;
  }
  float weight_of(float logit) const { return exp(broadcast((logit - largest) * per_temperature))[0]; }
};

// A temperature near 0 must not make 0 · inf of equal logits.
inline float per_temperature_of(float temperature) { return temperature > 0.0f ? std::min(1.0f / temperature, 1e30f) : 1.0f; }

inline float largest_of(const float* logits, int64_t count) {
  Vec largest = broadcast(-kInfinity), broken = {};
  for_vectors(count, [&](int64_t i, auto lanes) {
    Vec x = load(logits + i, lanes);
    if constexpr (!std::is_same_v<decltype(lanes), AllLanes>) {  // the lanes beyond the end read as zero
      float padded[kLanes];
      store(padded, broadcast(-kInfinity));
      store(padded, x, lanes);
      x = load(padded);
    }
    broken += x - x;  // NaN for NaN, and for infinities
    largest = maximum(largest, x);
  });
  const float found = maximum_of(largest);
  if (llmc::sum_of(broken) == 0.0f) return found;
  for (int64_t i = 0; i < count; i++)  // -inf is a logit like any other
    if (std::isnan(logits[i])) return kInfinity;
  return found;
}

// The sum of e^((logit - largest) / temperature).
inline float sum_of_weights(const float* logits, int64_t count, float largest, float per_temperature) {
  Vec sum = {};
  for_vectors(count, [&](int64_t i, auto lanes) {
    sum += keep(exp((load(logits + i, lanes) - largest) * per_temperature), lanes);
  });
  return sum_of(sum);
}

// The lowest token with the largest logit, or that is NaN where one is.
inline int32_t first_largest(const LogitRow& row) {
  if (row.largest == kInfinity)
    for (int64_t i = 0; i < row.vocabulary; i++)
      if (std::isnan(row.logits[i])) return static_cast<int32_t>(i);
  for (int64_t block = 0;; block++) {
    if (row.blocks[block].largest != row.largest) continue;
    for (int64_t i = row.begin(block); i < row.end(block); i++)
      if (row.logits[i] == row.largest) return static_cast<int32_t>(i);
  }
}

// Offers the first tokens of a part of a row that begins within a group of noise, and returns their number.
inline int64_t offer_begun_group(const LogitRow& row, int64_t first, LargestSum* found) {
  const int64_t left = (kNoiseGroup - first % kNoiseGroup) % kNoiseGroup, count = std::min(left, row.vocabulary);
  int32_t tokens[kNoiseGroup];
  float weights[kNoiseGroup];
  for (int64_t i = 0; i < count; i++) tokens[i] = static_cast<int32_t>(i), weights[i] = row.weight_of(row.logits[i]);
  found->offer_tokens(tokens, weights, count);
  return count;
}

// All tokens, the block with the row's largest logit first: what is found there lets most others be passed over.
inline void offer_all(const LogitRow& row, int64_t first, LargestSum* found) {
  const int64_t begun = offer_begun_group(row, first, found);
  const auto offer = [&](int64_t begin) {
    const int64_t end = std::min(row.vocabulary, begin + LargestSum::kTile);
    float bound = -kInfinity;
    for (int64_t block = begin / kLogitBlock; row.begin(block) < end; block++)
      bound = std::max(bound, row.blocks[block].largest);
    found->offer_tile(begin, end, bound);
  };
  int64_t likeliest = 0, tiles = (row.vocabulary - begun + LargestSum::kTile - 1) / LargestSum::kTile;
  for (int64_t block = 1; block < LogitRow::blocks_of(row.vocabulary); block++)
    if (row.blocks[block].largest > row.blocks[likeliest].largest) likeliest = block;
  const int64_t before = std::max<int64_t>(row.begin(likeliest) - begun, 0) / LargestSum::kTile;
  if (before < tiles) offer(begun + before * LargestSum::kTile);
  for (int64_t tile = 0; tile < tiles; tile++)
    if (tile != before) offer(begun + tile * LargestSum::kTile);
}

}  // namespace llmc
