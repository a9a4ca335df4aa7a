// llmc::score_leverage: how far each of a request's keys stands out, blended with its own chunk's attention to it
// (llmc/ops/score_leverage.py).
//
// Keys are read three times: for the chunk's attention, for XᵀX of centred, sketched keys, and for their leverage, which
// is |L⁻¹x|² where XᵀX + εI = LLᵀ. XᵀX is summed in double, so that the mean can be subtracted afterwards.
#include <cmath>

#include "hadamard.h"
#include "key_attention.h"

enum { LLMC_SKETCH = 48 };  // SKETCH of llmc/ops/score_leverage.py

typedef struct {
  int64_t heads, kv_heads, block_size, half, value_dim, turning;
  const void* q_first;  // [blocks, heads, block_size, half]
  const void* q_second;
  const void* k_cache;
  const void* v_cache;
  const void* attention;  // [blocks, kv_heads, block_size], fp32; of the rows before the chunk's
  const void* positions;
  const int32_t* compaction;
  const float* sketch;    // [2 * half, LLMC_SKETCH]
  const float* inv_freq;  // [turning]
  int32_t interleaved, is_spread;
  float scale;
  float softcap;  // 0: none
  int64_t sinks, recent, longest;
  int64_t cache_group;  // of codes: channels that share a scale; 0: all of a head's
  float* angles;        // [longest, 2, turning]: cos and sin of each position, turned back
  float* pooled;        // [kv_heads, longest]
  float* scores;        // [kv_heads, longest]
  float* new_attention;
  float* new_positions;
} LlmcScoreLeverage;

namespace {

constexpr double kRidge = 1e-2;
constexpr double kLeastDeviation = 1e-6;

// The keys of one head that may leave, centred and sketched.
struct Sketched {
  double mean[LLMC_SKETCH] = {};
  double square[LLMC_SKETCH][LLMC_SKETCH] = {};  // XᵀX, then L by columns: square[j][i] is row i of column j

  void add(const float* x) {
    for (int i = 0; i < LLMC_SKETCH; i++) {
      const double own = x[i];
      mean[i] += own;
      for (int j = 0; j <= i; j++) square[j][i] += own * x[j];
    }
  }

  void factorize(int64_t rows) {
    for (double& each : mean) each /= static_cast<double>(rows);
    for (int j = 0; j < LLMC_SKETCH; j++)
      for (int i = j; i < LLMC_SKETCH; i++)
        square[j][i] += (i == j ? kRidge : 0.0) - static_cast<double>(rows) * mean[i] * mean[j];
    for (int j = 0; j < LLMC_SKETCH; j++) {
      const double root = std::sqrt(square[j][j]);
      for (int i = j; i < LLMC_SKETCH; i++) square[j][i] /= root;
      for (int k = j + 1; k < LLMC_SKETCH; k++)
        for (int i = k; i < LLMC_SKETCH; i++) square[k][i] -= square[j][k] * square[j][i];
    }
  }

  float leverage(const float* x) const {
    double left[LLMC_SKETCH], sum = 0.0;
    for (int i = 0; i < LLMC_SKETCH; i++) left[i] = x[i] - mean[i];
    for (int j = 0; j < LLMC_SKETCH; j++) {
      const double y = left[j] / square[j][j];
      sum += y * y;
      for (int i = j + 1; i < LLMC_SKETCH; i++) left[i] -= y * square[j][i];
    }
    return static_cast<float>(sum);
  }
};

template <class K>
struct Head {
  const LlmcScoreLeverage& a;
  const llmc::Compaction& request;
  int64_t head;
  float* scores;
  float* attention;
  float* positions;

  Head(const LlmcScoreLeverage& a, const llmc::Compaction& request, int64_t head)
      : a(a),
        request(request),
        head(head),
        scores(a.scores + head * a.longest),
        attention(a.new_attention + head * a.longest),
        positions(a.new_positions + head * a.longest) {}

  void read(const void* from, int64_t channels, int64_t row, float* to) const {
    const llmc::Cache<K> cache(channels, a.block_size, a.cache_group);
    const int64_t block = request.blocks[row / a.block_size] * a.kv_heads + head;
    const auto* data = static_cast<const uint8_t*>(from) + block * cache.head_bytes();
    llmc::decode(cache, cache.row(data, row % a.block_size), to);
  }

  // Copies the numbers of the rows before the chunk, and numbers its own positions.
  void carry_over() const {
    const int64_t size = a.block_size, before = request.rows - request.queries;
    for (int64_t row = 0; row < before; row++) {
      const int64_t from = (request.blocks[row / size] * a.kv_heads + head) * size + row % size;
      attention[row] = static_cast<const float*>(a.attention)[from];
      positions[row] = static_cast<const float*>(a.positions)[from];
    }
    const float begin = before > 0 ? positions[before - 1] + 1.0f : 0.0f;
    for (int64_t row = before; row < request.rows; row++) {
      attention[row] = 0.0f;
      positions[row] = begin + static_cast<float>(row - before);
    }
    for (float* each : {attention, positions}) std::fill(each + request.rows, each + a.longest, 0.0f);
    std::fill(scores, scores + a.longest, 0.0f);
  }

  template <class T>
  void attend() const {
    const int64_t before = request.rows - request.queries, first = std::max(before, a.sinks);
    if (first >= request.rows) return;
    llmc::Compaction chunk = request;
    chunk.slots += first - before;
    chunk.queries = request.rows - first;
    const llmc::KeyAttention<T, K, LlmcScoreLeverage> among(a, chunk, head, first);
    among.sum(request.rows, attention);
    for (int64_t row = first; row < request.rows; row++) attention[row] /= static_cast<float>(among.group());
  }

  // The sketch of a key before its rotation.
  void sketch(int64_t row, float* x) const {
    float key[LLMC_CODED_HEAD];
    const int64_t channels = 2 * a.half;
    read(a.k_cache, channels, row, key);
    if (a.is_spread) llmc::rotate_blocks(key, channels, key);
    if (a.turning > 0) {
      const float* cos = a.angles + static_cast<int64_t>(positions[row]) * 2 * a.turning;
      llmc::rotate(llmc::Rotation{cos, cos + a.turning, a.turning, a.interleaved != 0}, channels, key, key);
    }
    for (int64_t i = 0; i < LLMC_SKETCH; i += llmc::kLanes) {
      llmc::Vec sum = llmc::broadcast(0.0f);
      for (int64_t c = 0; c < channels; c++) sum += llmc::load(a.sketch + c * LLMC_SKETCH + i) * key[c];
      llmc::store(x + i, sum);
    }
  }

  // Leverage into scores, and attention times the values' norms, averaged over neighbours, into a.pooled.
  void score(int64_t first, int64_t last) const {
    float x[LLMC_SKETCH], value[LLMC_CODED_HEAD];
    float* pooled = a.pooled + head * a.longest;
    Sketched keys;
    for (int64_t row = first; row < last; row++) {
      sketch(row, x);
      keys.add(x);
    }
    keys.factorize(last - first);
    float behind = 0.0f, own = 0.0f;
    for (int64_t row = first; row <= last; row++) {
      float next = 0.0f;
      if (row < last) {
        sketch(row, x);
        scores[row] = keys.leverage(x);
        read(a.v_cache, a.value_dim, row, value);
        next = attention[row] * std::sqrt(llmc::dot_of(value, value, a.value_dim));
      }
      if (row > first) pooled[row - 1] = (behind + own + next) / 3.0f;
      behind = own;
      own = next;
    }
  }
};

// Mean and standard deviation of the numbers [first, last) of all heads.
struct Standard {
  double mean = 0.0, deviation = 0.0;

  Standard(const LlmcScoreLeverage& a, const float* numbers, int64_t first, int64_t last) {
    const auto count = static_cast<double>(a.kv_heads * (last - first));
    for (int64_t head = 0; head < a.kv_heads; head++)
      for (int64_t row = first; row < last; row++) mean += numbers[head * a.longest + row];
    mean /= count;
    for (int64_t head = 0; head < a.kv_heads; head++)
      for (int64_t row = first; row < last; row++) {
        const double from_mean = numbers[head * a.longest + row] - mean;
        deviation += from_mean * from_mean;
      }
    deviation = std::max(std::sqrt(deviation / (count - 1.0)), kLeastDeviation);
  }
  double of(float x) const { return (x - mean) / deviation; }
};

// The angles of all positions, turned back.
void turn(LlmcPool* pool, const LlmcScoreLeverage& a, int64_t positions) {
  llmc::for_rows(pool, positions, 64 * a.turning, [&](int64_t position) {
    float* cos = a.angles + position * 2 * a.turning;
    for (int64_t i = 0; i < a.turning; i++) {
      const float angle = -static_cast<float>(position) * a.inv_freq[i];
      cos[i] = std::cos(angle);
      cos[a.turning + i] = std::sin(angle);
    }
  });
}

template <class T, class K>
void score_leverage(LlmcPool* pool, const LlmcScoreLeverage& a) {
  const llmc::Compaction request(a.compaction, a.block_size);
  llmc::parallel_for(pool, a.kv_heads, [&](int64_t head, void*) {
    const Head<K> own(a, request, head);
    own.carry_over();
    own.template attend<T>();
  });
  if (request.kept >= request.rows) return;
  const int64_t first = a.sinks, last = request.rows - a.recent;
  const int64_t tokens = static_cast<int64_t>(a.new_positions[request.rows - 1]) + 1;
  if (a.turning > 0) turn(pool, a, tokens);
  llmc::parallel_for(pool, a.kv_heads, [&](int64_t head, void*) { Head<K>(a, request, head).score(first, last); });
  const double share = 1.0 - static_cast<double>(request.kept) / static_cast<double>(tokens);
  const Standard leverage(a, a.scores, first, last), attention(a, a.pooled, first, last);
  llmc::parallel_for(pool, a.kv_heads, [&](int64_t head, void*) {
    for (int64_t at = head * a.longest + first; at < head * a.longest + last; at++)
      a.scores[at] = static_cast<float>(share * leverage.of(a.scores[at]) + attention.of(a.pooled[at]));
  });
}

}  // namespace

LLMC_KERNEL(LlmcScoreLeverage, score_leverage_f32_f32, score_leverage<float, float>)
LLMC_KERNEL(LlmcScoreLeverage, score_leverage_f32_bf16, score_leverage<float, llmc::bf16>)
LLMC_KERNEL(LlmcScoreLeverage, score_leverage_f32_int8, score_leverage<float, llmc::Int8Cache>)
LLMC_KERNEL(LlmcScoreLeverage, score_leverage_f32_int4, score_leverage<float, llmc::Int4Cache>)
LLMC_KERNEL(LlmcScoreLeverage, score_leverage_f32_fp8, score_leverage<float, llmc::Fp8Cache>)
LLMC_KERNEL(LlmcScoreLeverage, score_leverage_bf16_f32, score_leverage<llmc::bf16, float>)
LLMC_KERNEL(LlmcScoreLeverage, score_leverage_bf16_bf16, score_leverage<llmc::bf16, llmc::bf16>)
LLMC_KERNEL(LlmcScoreLeverage, score_leverage_bf16_int8, score_leverage<llmc::bf16, llmc::Int8Cache>)
LLMC_KERNEL(LlmcScoreLeverage, score_leverage_bf16_int4, score_leverage<llmc::bf16, llmc::Int4Cache>)
LLMC_KERNEL(LlmcScoreLeverage, score_leverage_bf16_fp8, score_leverage<llmc::bf16, llmc::Fp8Cache>)
