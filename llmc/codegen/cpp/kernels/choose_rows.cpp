// A token of each row of logits, by temperature, top-k, top-p and min-p: what llmc/runtime/sampling/sampler.py does, faster.
//
// A row is read once, in blocks: their largest logits and, for top-p, their sums of e^((x - largest) / temperature),
// which stay in cache. A draw is the largest sum of logit and noise, and blocks whose logits are too small for any noise
// are passed over. For the filters the blocks say where tokens can be that survive: those are gathered, few of them even
// of a large vocabulary, and only they are drawn from. A row's token depends on nothing but the row and its own numbers.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <type_traits>

#include "activation.h"
#include "gumbel_noise.h"
#include "row.h"

namespace {

using llmc::AllLanes;
using llmc::Vec;
using llmc::broadcast;

constexpr int64_t kBlock = 512;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Weights in (2^-64, 1] by the upper 13 of their bits, 16 bins for each power of two; all others are in the last.
constexpr int kBinShift = 19;
constexpr uint32_t kBins = 64 * 16 + 1;
// One vector in so many is looked at to guess.
constexpr int kSample = 32;

struct Block {
  float largest;
  float sum;
};

// Tokens that may come, in order, and their weights; a vector more than a row has fits.
struct Candidates {
  float* weights;
  int32_t* tokens;
  int64_t count;
};

// What one thread works with.
struct Scratch {
  double* bins;
  Block* blocks;
  float* weights;  // candidates'
  int32_t* tokens;
  float* spare;  // as many as weights

  static int64_t blocks_of(int64_t vocabulary) { return (vocabulary + kBlock - 1) / kBlock; }
  static int64_t candidates_of(int64_t vocabulary) { return blocks_of(vocabulary) * kBlock + llmc::kLanes; }
  static int64_t bytes(int64_t vocabulary) {
    const int64_t bins = kBins * sizeof(double), blocks = blocks_of(vocabulary) * sizeof(Block);
    return bins + blocks + candidates_of(vocabulary) * static_cast<int64_t>(2 * sizeof(float) + sizeof(int32_t));
  }
  Scratch(void* memory, int64_t vocabulary)
      : bins(static_cast<double*>(memory)),
        blocks(reinterpret_cast<Block*>(bins + kBins)),
        weights(reinterpret_cast<float*>(blocks + blocks_of(vocabulary))),
        tokens(reinterpret_cast<int32_t*>(weights + candidates_of(vocabulary))),
        spare(reinterpret_cast<float*>(tokens + candidates_of(vocabulary))) {}
};

// One row, its numbers, and what was found out about it.
struct Row {
  const float* logits;
  int64_t vocabulary;
  float per_temperature;
  const Block* blocks;
  float largest;
  double total;  // Σ weights; a token's weight is e^((logit - largest) / temperature)

  int64_t begin(int64_t block) const { return block * kBlock; }
  int64_t end(int64_t block) const { return std::min(vocabulary, (block + 1) * kBlock); }
  // A logit whose weight is this, or a little less.
  float logit_of(float weight) const {
    return weight <= 0.0f ? -kInfinity : largest + (std::log(weight) - 1e-3f) / per_temperature;
  }
  float weight_of(float logit) const { return llmc::exp(broadcast((logit - largest) * per_temperature))[0]; }
};

float largest_of(const float* logits, int64_t count) {
  Vec largest = broadcast(-kInfinity), broken = {};
  llmc::for_vectors(count, [&](int64_t i, auto lanes) {
    Vec x = llmc::load(logits + i, lanes);
    if constexpr (!std::is_same_v<decltype(lanes), AllLanes>) {  // the lanes beyond the end read as zero
      float padded[llmc::kLanes];
      llmc::store(padded, broadcast(-kInfinity));
      llmc::store(padded, x, lanes);
      x = llmc::load(padded);
    }
    broken += x - x;  // NaN for NaN, and for infinities
    largest = llmc::maximum(largest, x);
  });
  const float found = llmc::maximum_of(largest);
  if (llmc::sum_of(broken) == 0.0f) return found;
  for (int64_t i = 0; i < count; i++)  // -inf is a logit like any other
    if (std::isnan(logits[i])) return kInfinity;
  return found;
}

float sum_of(const float* logits, int64_t count, float largest, float per_temperature) {
  Vec sum = {};
  llmc::for_vectors(count, [&](int64_t i, auto lanes) {
    sum += llmc::keep(llmc::exp((llmc::load(logits + i, lanes) - largest) * per_temperature), lanes);
  });
  return llmc::sum_of(sum);
}

// The lowest token with the largest logit, or that is NaN where one is.
int32_t first_largest(const Row& row) {
  if (row.largest == kInfinity)
    for (int64_t i = 0; i < row.vocabulary; i++)
      if (std::isnan(row.logits[i])) return static_cast<int32_t>(i);
  for (int64_t block = 0;; block++) {
    if (row.blocks[block].largest != row.largest) continue;
    for (int64_t i = row.begin(block); i < row.end(block); i++)
      if (row.logits[i] == row.largest) return static_cast<int32_t>(i);
  }
}

// All tokens, the block with the largest logit first: what is found there lets most others be passed over.
void offer_all(const Row& row, llmc::LargestSum* found) {
  static_assert(llmc::LargestSum::kTile % kBlock == 0 || kBlock % llmc::LargestSum::kTile == 0);
  const auto offer = [&](int64_t begin) {
    const int64_t end = std::min(row.vocabulary, begin + llmc::LargestSum::kTile);
    float bound = -kInfinity;
    for (int64_t block = begin / kBlock; row.begin(block) < end; block++)
      bound = std::max(bound, row.blocks[block].largest);
    found->offer_tile(begin, end, bound);
  };
  const int64_t likeliest = first_largest(row) / llmc::LargestSum::kTile * llmc::LargestSum::kTile;
  offer(likeliest);
  for (int64_t begin = 0; begin < row.vocabulary; begin += llmc::LargestSum::kTile)
    if (begin != likeliest) offer(begin);
}

// The tokens whose logit is at least `least`. Without branches, which nobody could predict.
Candidates gather(const Row& row, float least, const Scratch& scratch) {
  float* const weights = scratch.weights;
  int32_t* const tokens = scratch.tokens;
  int64_t count = 0;
  for (int64_t block = 0; block < Scratch::blocks_of(row.vocabulary); block++) {
    if (row.blocks[block].largest < least) continue;
    const int64_t end = row.end(block);
    int64_t i = row.begin(block);
#if defined(__AVX512F__)
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + llmc::kLanes <= end; i += llmc::kLanes) {
      const Vec x = llmc::load(row.logits + i);
      const __mmask16 kept = _mm512_cmp_ps_mask(x, broadcast(least), _CMP_GE_OQ);
      const __m512i ids = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int32_t>(i)));
      _mm512_storeu_ps(weights + count, _mm512_maskz_compress_ps(kept, x));
      _mm512_storeu_si512(tokens + count, _mm512_maskz_compress_epi32(kept, ids));
      count += __builtin_popcount(kept);
    }
#endif
    for (; i < end; i++) {
      weights[count] = row.logits[i];
      tokens[count] = static_cast<int32_t>(i);
      count += row.logits[i] >= least;
    }
  }
  for (int64_t i = 0; i < count; i += llmc::kLanes)  // beyond the end, into the room for a vector
    llmc::store(weights + i, llmc::exp((llmc::load(weights + i) - row.largest) * row.per_temperature));
  return {weights, tokens, count};
}

double sum_of(const Candidates& c) {
  double sums[4] = {};
  int64_t i = 0;
  for (; i + 4 <= c.count; i += 4)
    for (int lane = 0; lane < 4; lane++) sums[lane] += c.weights[i + lane];
  for (; i < c.count; i++) sums[0] += c.weights[i];
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// Those for which keep(index) holds.
template <class Keep>
Candidates filter(const Candidates& c, const Keep& keep) {
  int64_t count = 0;
  for (int64_t i = 0; i < c.count; i++) {
    const bool stays = keep(i);
    c.weights[count] = c.weights[i];
    c.tokens[count] = c.tokens[i];
    count += stays;
  }
  return {c.weights, c.tokens, count};
}

// The k likeliest, and those that are as likely as the k-th.
Candidates keep_top_k(const Row& row, int64_t k, const Scratch& scratch) {
  const int64_t blocks = Scratch::blocks_of(row.vocabulary);
  float* const logits = scratch.spare;
  // At least k tokens, and few more, reach the k-th largest of the blocks' largest.
  float least = -kInfinity;
  if (k <= blocks) {
    for (int64_t block = 0; block < blocks; block++) logits[block] = row.blocks[block].largest;
    std::nth_element(logits, logits + k - 1, logits + blocks, std::greater<float>());
    least = logits[k - 1];
  }
  const Candidates found = gather(row, least, scratch);
  if (found.count <= k) return found;
  // By logit, since different logits may have one weight.
  for (int64_t i = 0; i < found.count; i++) logits[i] = row.logits[found.tokens[i]];
  std::nth_element(logits, logits + k - 1, logits + found.count, std::greater<float>());
  const float threshold = logits[k - 1];
  return filter(found, [&](int64_t i) { return row.logits[found.tokens[i]] >= threshold; });
}

// Ascends as weights descend from 1.
uint32_t key_of(float weight) { return weight >= 1.0f ? 0 : llmc::to_bits(1.0f) - llmc::to_bits(weight); }
uint32_t bin_of(float weight) { return std::min(key_of(weight) >> kBinShift, kBins - 1); }

// The first bin at which what is taken reaches `wanted`, or the last one; what lies before it is taken.
uint32_t bin_reaching(double wanted, const double* bins, uint32_t count, double* taken) {
  uint32_t bin = 0;
  while (bin < count - 1 && *taken + bins[bin] < wanted) *taken += bins[bin++];
  return bin;
}

// The likeliest whose weights sum to at least `wanted`, and those that are as likely as the last: its weight is found
// a few bits at a time, among those that agree in the bits before.
Candidates keep_nucleus(double wanted, const Candidates& c, const Scratch& scratch) {
  double* const bins = scratch.bins;
  std::fill(bins, bins + kBins, 0.0);
  for (int64_t i = 0; i < c.count; i++) bins[bin_of(c.weights[i])] += c.weights[i];
  double taken = 0.0;
  uint32_t last = bin_reaching(wanted, bins, kBins, &taken);
  if (last == kBins - 1) return c;
  float* const edge = scratch.spare;
  int64_t count = 0;
  for (int64_t i = 0; i < c.count; i++) {
    edge[count] = c.weights[i];
    count += bin_of(c.weights[i]) == last;
  }
  for (int shift = kBinShift; shift > 0;) {
    const int bits = std::min(shift, 8);
    shift -= bits;
    std::fill(bins, bins + (1 << bits), 0.0);
    const uint32_t mask = (1u << bits) - 1;
    for (int64_t i = 0; i < count; i++) bins[key_of(edge[i]) >> shift & mask] += edge[i];
    last = last << bits | bin_reaching(wanted, bins, 1u << bits, &taken);
    count = std::remove_if(edge, edge + count, [&](float w) { return key_of(w) >> shift != last; }) - edge;
  }
  return filter(c, [&](int64_t i) { return key_of(c.weights[i]) <= last; });
}

// A weight below which the tokens together seem to have at most `budget`, by a sample. The few heavy tokens that a
// sample misses do not matter, since only the many light ones are summed up.
float light_weight(const Row& row, double budget, const Scratch& scratch) {
  double* const bins = scratch.bins;
  std::fill(bins, bins + kBins, 0.0);
  for (int64_t i = 0; i + llmc::kLanes <= row.vocabulary; i += kSample * llmc::kLanes) {
    float weights[llmc::kLanes];
    llmc::store(weights, llmc::exp((llmc::load(row.logits + i) - row.largest) * row.per_temperature));
    for (float weight : weights) bins[bin_of(weight)] += weight;
  }
  uint32_t bin = kBins - 1;
  for (double light = 0.0; bin > 0 && kSample * (light + bins[bin]) <= budget; bin--) light += bins[bin];
  if (bin + 2 >= kBins) return 0.0f;
  return llmc::from_bits(llmc::to_bits(1.0f) - ((bin + 1) << kBinShift));
}

// The likeliest tokens that together have at least `wanted`, and some more.
Candidates gather_mass(const Row& row, double wanted, const Scratch& scratch) {
  const double budget = row.total - wanted;
  const float guess = light_weight(row, 0.5 * budget, scratch);
  const Candidates found = gather(row, row.logit_of(guess), scratch);
  if (sum_of(found) >= wanted) return found;
  // All tokens below this weight together weigh less than the budget.
  const float least = static_cast<float>(0.99 * budget / static_cast<double>(row.vocabulary));
  return gather(row, row.logit_of(std::min(least, 0.5f)), scratch);
}

void choose_row(const LlmcChooseRows& a, int64_t index, void* memory) {
  const Scratch scratch(memory, a.vocabulary);
  const float temperature = a.temperature[index];
  const bool is_random = temperature > 0.0f;
  const float* logits = a.logits + index * a.vocabulary;
  // A temperature near 0 must not make 0 · inf of equal logits.
  Row row = {logits, a.vocabulary, is_random ? std::min(1.0f / temperature, 1e30f) : 1.0f, scratch.blocks, -kInfinity, 0};
  const int64_t blocks = Scratch::blocks_of(a.vocabulary);
  const int64_t top_k = a.top_k[index];
  const double top_p = a.top_p[index];
  const float min_p = a.min_p[index];
  const bool cuts_k = top_k < a.vocabulary, cuts_p = top_p < 1.0, cuts_min = min_p > 0.0f;
  const bool needs_total = is_random && !cuts_k && cuts_p;
  for (int64_t block = 0; block < blocks; block++) {
    const float* begin = logits + row.begin(block);
    const int64_t count = row.end(block) - row.begin(block);
    const float largest = largest_of(begin, count);
    row.largest = std::max(row.largest, largest);
    const bool has_sum = needs_total && std::isfinite(largest);
    scratch.blocks[block] = {largest, has_sum ? sum_of(begin, count, largest, row.per_temperature) : 0.0f};
  }
  a.scores[index] = row.largest;
  if (!is_random || !std::isfinite(row.largest)) {
    const int32_t token = row.largest == -kInfinity ? 0 : first_largest(row);
    a.tokens[index] = token;
    if (row.largest == kInfinity) a.scores[index] = logits[token];  // NaN is told from infinity
    return;
  }
  for (int64_t block = 0; needs_total && block < blocks; block++)
    row.total += double{scratch.blocks[block].sum} * row.weight_of(scratch.blocks[block].largest);
  const llmc::NoiseKey key = {static_cast<uint32_t>(a.seeds[index]), static_cast<uint32_t>(a.counters[index])};
  llmc::LargestSum found(logits, row.largest, row.per_temperature, key);
  if (!cuts_k && !cuts_p && !cuts_min) {
    offer_all(row, &found);
    a.tokens[index] = found.token();
    return;
  }
  Candidates kept;
  if (cuts_k) {
    kept = keep_top_k(row, top_k, scratch);
    if (cuts_p) kept = keep_nucleus(top_p * sum_of(kept), kept, scratch);
  } else if (cuts_p) {
    kept = keep_nucleus(top_p * row.total, gather_mass(row, top_p * row.total, scratch), scratch);
  } else {
    kept = gather(row, row.logit_of(min_p), scratch);
  }
  if (cuts_min) kept = filter(kept, [&](int64_t i) { return kept.weights[i] >= min_p; });
  found.offer_tokens(kept.tokens, kept.weights, kept.count);
  a.tokens[index] = found.token();
}

}  // namespace

int64_t llmc_choose_rows_scratch(int64_t vocabulary) { return Scratch::bytes(vocabulary); }

void llmc_choose_rows(LlmcPool* pool, const LlmcChooseRows* arguments) {
  const LlmcChooseRows& a = *arguments;
  llmc::parallel_for(pool, a.rows, [&](int64_t row, void* scratch) { choose_row(a, row, scratch); });
}
