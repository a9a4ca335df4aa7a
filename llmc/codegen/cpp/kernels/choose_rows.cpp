// A token of each row of logits, by temperature, top-k, top-p and min-p: what llmc/runtime/sampling/sampler.py does, faster.
//
// A row is read once, in blocks: their largest logits and, for top-p, their sums of e^((x - largest) / temperature),
// which stay in cache. A draw is the largest sum of logit and noise, and blocks whose logits are too small for any noise
// are passed over. For the filters the blocks say where tokens can be that survive: those are gathered, few of them even
// of a large vocabulary, and only they are drawn from. A row's token depends on nothing but the row and its own numbers.
#include <algorithm>
#include <cmath>
#include <functional>

#include "logit_row.h"

namespace {

using llmc::LogitBlock;
using llmc::Vec;
using llmc::broadcast;
using llmc::kInfinity;
using Row = llmc::LogitRow;

// Weights in (2^-64, 1] by the upper 13 of their bits, 16 bins for each power of two; all others are in the last.
constexpr int kBinShift = 19;
constexpr uint32_t kBins = 64 * 16 + 1;
// The guess reads one vector in kSample.
constexpr int kSample = 32;

// Candidate tokens, in order, and their weights; there is room for one vector more than a row has.
struct Candidates {
  float* weights;
  int32_t* tokens;
  int64_t count;
};

// The buffers of one thread.
struct Scratch {
  double* bins;
  LogitBlock* blocks;
  float* weights;  // candidates'
  int32_t* tokens;
  float* spare;  // the same length as weights

  static int64_t candidates_of(int64_t vocabulary) { return Row::blocks_of(vocabulary) * llmc::kLogitBlock + llmc::kLanes; }
  static int64_t bytes(int64_t vocabulary) {
    const int64_t bins = kBins * sizeof(double), blocks = Row::blocks_of(vocabulary) * sizeof(LogitBlock);
    return bins + blocks + candidates_of(vocabulary) * static_cast<int64_t>(2 * sizeof(float) + sizeof(int32_t));
  }
  Scratch(void* memory, int64_t vocabulary)
      : bins(static_cast<double*>(memory)),
        blocks(reinterpret_cast<LogitBlock*>(bins + kBins)),
        weights(reinterpret_cast<float*>(blocks + Row::blocks_of(vocabulary))),
        tokens(reinterpret_cast<int32_t*>(weights + candidates_of(vocabulary))),
        spare(reinterpret_cast<float*>(tokens + candidates_of(vocabulary))) {}
};

// The tokens whose logit is at least `least`. Without branches, which would be unpredictable.
Candidates gather(const Row& row, float least, const Scratch& scratch) {
  float* const weights = scratch.weights;
  int32_t* const tokens = scratch.tokens;
  int64_t count = 0;
  for (int64_t block = 0; block < Row::blocks_of(row.vocabulary); block++) {
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

// The candidates for which keep(index) holds.
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
  const int64_t blocks = Row::blocks_of(row.vocabulary);
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
  Row row = {logits, a.vocabulary, llmc::per_temperature_of(temperature), scratch.blocks, -kInfinity, 0};
  const int64_t blocks = Row::blocks_of(a.vocabulary);
  const int64_t top_k = a.top_k[index];
  const double top_p = a.top_p[index];
  const float min_p = a.min_p[index];
  const bool cuts_k = top_k < a.vocabulary, cuts_p = top_p < 1.0, cuts_min = min_p > 0.0f;
  const bool needs_total = is_random && !cuts_k && cuts_p;
  for (int64_t block = 0; block < blocks; block++) {
    const float* begin = logits + row.begin(block);
    const int64_t count = row.end(block) - row.begin(block);
    const float largest = llmc::largest_of(begin, count);
    row.largest = std::max(row.largest, largest);
    const bool has_sum = needs_total && std::isfinite(largest);
    const float sum = has_sum ? llmc::sum_of_weights(begin, count, largest, row.per_temperature) : 0.0f;
    scratch.blocks[block] = {largest, sum};
  }
  a.scores[index] = row.largest;
  if (!is_random || !std::isfinite(row.largest)) {
    const int32_t token = row.largest == -kInfinity ? 0 : llmc::first_largest(row);
    a.tokens[index] = token;
    if (row.largest == kInfinity) a.scores[index] = logits[token];  // distinguishes NaN from infinity
    return;
  }
  for (int64_t block = 0; needs_total && block < blocks; block++)
    row.total += double{scratch.blocks[block].sum} * row.weight_of(scratch.blocks[block].largest);
  const llmc::NoiseKey key = {static_cast<uint32_t>(a.seeds[index]), static_cast<uint32_t>(a.counters[index])};
  llmc::LargestSum found(logits, row.largest, row.per_temperature, key);
  if (!cuts_k && !cuts_p && !cuts_min) {
    llmc::offer_all(row, 0, &found);
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
