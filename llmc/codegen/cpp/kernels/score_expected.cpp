// llmc::score_expected: the attention that a request's keys can expect from later queries (llmc/ops/score_expected.py).
//
// score[r] = max over heads of a group of z(w . (k[r], |pairs of k[r]|)), where w turns the head's mean query to the
// positions of later ones, and z subtracts the mean of the rows that may leave and divides by their deviation.
#include <cmath>
#include <limits>

#include "hadamard.h"
#include "key_attention.h"

typedef struct {
  int64_t heads, kv_heads, block_size, channels, half;
  const void* k_cache;
  const int32_t* compaction;
  const float* means;     // [heads, channels + half]
  const float* inv_freq;  // [half]
  int32_t interleaved, is_spread;
  int64_t sinks, recent, longest;
  int64_t cache_group;  // of codes: channels that share a scale; 0: all of a head's
  float* weights;       // [heads, channels + half]
  float* expected;      // [heads, longest]
  float* scores;        // [kv_heads, longest]
} LlmcScoreExpected;

namespace {

constexpr int kPowers = 17;  // later queries at distances of 1, 2, 4, …
constexpr double kLeastDeviation = 1e-6;

// The places of a pair's channels.
struct Pair {
  int64_t first, second;

  Pair(const LlmcScoreExpected& a, int64_t f)
      : first(a.interleaved != 0 ? 2 * f : f), second(a.interleaved != 0 ? 2 * f + 1 : a.half + f) {}
};

template <class K>
struct Head {
  const LlmcScoreExpected& a;
  const llmc::Compaction& request;
  int64_t kv_head;
  int64_t group = a.heads / a.kv_heads, width = a.channels + a.half;

  float* weights(int64_t head) const { return a.weights + (kv_head * group + head) * width; }
  float* expected(int64_t head) const { return a.expected + (kv_head * group + head) * a.longest; }

  // The means of the group's queries, turned to later positions.
  void turn_means() const {
    for (int64_t head = 0; head < group; head++)
      std::copy_n(a.means + (kv_head * group + head) * width, width, weights(head));
    for (int64_t f = 0; f < a.half; f++) {
      const Pair pair(a, f);
      double cos = 0.0, sin = 0.0;
      for (int power = 0; power < kPowers; power++) {
        const double angle = static_cast<double>(request.tokens + (int64_t{1} << power)) * a.inv_freq[f];
        cos += std::cos(angle) / kPowers;
        sin += std::sin(angle) / kPowers;
      }
      for (int64_t head = 0; head < group; head++) {
        float* w = weights(head);
        const double first = w[pair.first], second = w[pair.second];
        w[pair.first] = static_cast<float>(first * cos - second * sin);
        w[pair.second] = static_cast<float>(first * sin + second * cos);
      }
    }
  }

  // A key's channels, then the absolute values of its pairs.
  void read(int64_t row, float* parts) const {
    const llmc::Cache<K> cache(a.channels, a.block_size, a.cache_group);
    const int64_t block = request.blocks[row / a.block_size] * a.kv_heads + kv_head;
    const auto* data = static_cast<const uint8_t*>(a.k_cache) + block * cache.head_bytes();
    llmc::decode(cache, cache.row(data, row % a.block_size), parts);
    if (a.is_spread) llmc::rotate_blocks(parts, a.channels, parts);
    for (int64_t f = 0; f < a.half; f++) {
      const Pair pair(a, f);
      parts[a.channels + f] = std::sqrt(parts[pair.first] * parts[pair.first] + parts[pair.second] * parts[pair.second]);
    }
  }

  void score(int64_t first, int64_t last) const {
    float* scores = a.scores + kv_head * a.longest;
    std::fill(scores, scores + a.longest, 0.0f);
    std::fill(scores, scores + request.pinned, std::numeric_limits<float>::infinity());
    if (first >= last) return;
    turn_means();
    float parts[2 * LLMC_CODED_HEAD];
    for (int64_t row = first; row < last; row++) {
      read(row, parts);
      for (int64_t head = 0; head < group; head++) expected(head)[row] = llmc::dot_of(parts, weights(head), width);
    }
    std::fill(scores + first, scores + last, -std::numeric_limits<float>::infinity());
    for (int64_t head = 0; head < group; head++) raise(expected(head), first, last, scores);
  }

  // Raises scores to a head's, standardized.
  static void raise(const float* own, int64_t first, int64_t last, float* scores) {
    const auto count = static_cast<double>(last - first);
    double mean = 0.0, square = 0.0;
    for (int64_t row = first; row < last; row++) mean += own[row] / count;
    for (int64_t row = first; row < last; row++) square += (own[row] - mean) * (own[row] - mean) / count;
    const double deviation = std::max(std::sqrt(square), kLeastDeviation);
    for (int64_t row = first; row < last; row++)
      scores[row] = std::max(scores[row], static_cast<float>((own[row] - mean) / deviation));
  }
};

template <class K>
void score_expected(LlmcPool* pool, const LlmcScoreExpected& a) {
  const llmc::Compaction request(a.compaction, a.block_size);
  const int64_t first = std::max(a.sinks, request.pinned), last = request.rows - a.recent;
  llmc::parallel_for(pool, a.kv_heads, [&](int64_t head, void*) { Head<K>{a, request, head}.score(first, last); });
}

}  // namespace

LLMC_KERNEL(LlmcScoreExpected, score_expected_f32, score_expected<float>)
LLMC_KERNEL(LlmcScoreExpected, score_expected_bf16, score_expected<llmc::bf16>)
LLMC_KERNEL(LlmcScoreExpected, score_expected_int8, score_expected<llmc::Int8Cache>)
LLMC_KERNEL(LlmcScoreExpected, score_expected_int4, score_expected<llmc::Int4Cache>)
LLMC_KERNEL(LlmcScoreExpected, score_expected_fp8, score_expected<llmc::Fp8Cache>)
