// llmc::score_keys: how much attention a request's last queries pay to each of its keys (llmc/ops/score_keys.py).
//
// score[r] = mean over neighbours of r, queries and heads of a group of softmax_r(scale * q . k[r]).
// Two passes over the keys, each of which is decoded once for all queries: the first one finds the largest logit and the
// sum of each query's softmax.
#include <cmath>
#include <limits>

#include "activation.h"
#include "cached_codes.h"
#include "compaction.h"

typedef struct {
  int64_t heads, kv_heads, block_size, half;
  const void* q_first;   // [blocks, heads, block_size, half]
  const void* q_second;
  const void* k_cache;
  const int32_t* compaction;
  float scale;
  int64_t pool;    // neighbours, an odd number
  float softcap;   // 0: none
  int64_t longest;
  int64_t cache_group;  // of codes: channels that share a scale; 0: all of a head's
  float* sums;     // [kv_heads, longest]
  float* scores;   // [kv_heads, longest]
} LlmcScoreKeys;

namespace {

constexpr int64_t kMostPairs = 4096;  // of a query and a head; llmc/codegen/cpp/compaction_kernels.py

template <class T>
float dot(const T* a, const float* b, int64_t channels) {
  llmc::Vec sum = llmc::broadcast(0.0f);
  llmc::for_vectors(channels, [&](int64_t c, auto lanes) {
    sum += llmc::keep(llmc::load(a + c, lanes) * llmc::load(b + c, lanes), lanes);
  });
  return llmc::sum_of(sum);
}

template <class T, class K>
struct Head {
  const LlmcScoreKeys& a;
  const llmc::Compaction& request;
  llmc::Cache<K> cache;
  int64_t kv_head;

  Head(const LlmcScoreKeys& a, const llmc::Compaction& request, int64_t kv_head)
      : a(a), request(request), cache(2 * a.half, a.block_size, a.cache_group), kv_head(kv_head) {}

  int64_t group() const { return a.heads / a.kv_heads; }
  int64_t pairs() const { return request.queries * group(); }

  const T* half(int64_t query, int64_t number) const {
    const int64_t slot = request.slots[query], size = a.block_size;
    const void* from = number < a.heads ? a.q_first : a.q_second;
    const int64_t head = number % a.heads;
    return static_cast<const T*>(from) + ((slot / size * a.heads + head) * size + slot % size) * a.half;
  }

  // The logits of a key, by query and head; those that do not see it have none.
  void logits(int64_t row, float* to) const {
    float key[LLMC_CODED_HEAD];
    const int64_t block = request.blocks[row / a.block_size];
    const auto* data = static_cast<const uint8_t*>(a.k_cache) + (block * a.kv_heads + kv_head) * cache.head_bytes();
    llmc::decode(cache, cache.row(data, row % a.block_size), key);
    for (int64_t query = 0, pair = 0; query < request.queries; query++) {
      const bool sees = row <= request.rows - request.queries + query;
      for (int64_t g = 0; g < group(); g++, pair++) {
        if (!sees) {
          to[pair] = -std::numeric_limits<float>::infinity();
          continue;
        }
        const int64_t first = 2 * (kv_head * group() + g);
        float logit = dot(half(query, first), key, a.half) + dot(half(query, first + 1), key + a.half, a.half);
        logit *= a.scale;
        to[pair] = a.softcap > 0.0f ? a.softcap * std::tanh(logit / a.softcap) : logit;
      }
    }
  }

  void score() const {
    float logit[kMostPairs], largest[kMostPairs], weight[kMostPairs];
    const int64_t count = pairs(), seen = request.rows - request.queries;
    std::fill(largest, largest + count, -std::numeric_limits<float>::infinity());
    std::fill(weight, weight + count, 0.0f);
    for (int64_t row = 0; row < request.rows; row++) {
      logits(row, logit);
      for (int64_t i = 0; i < count; i++) {
        if (logit[i] > largest[i]) {
          weight[i] *= std::exp(largest[i] - logit[i]);
          largest[i] = logit[i];
        }
      }
      llmc::for_vectors(count, [&](int64_t i, auto lanes) {
        const llmc::Vec x = llmc::exp(llmc::load(logit + i, lanes) - llmc::load(largest + i, lanes));
        llmc::store(weight + i, llmc::load(weight + i, lanes) + x, lanes);
      });
    }
    for (int64_t i = 0; i < count; i++) weight[i] = 1.0f / weight[i];
    float* sums = a.sums + kv_head * a.longest;
    for (int64_t row = 0; row < seen; row++) {
      logits(row, logit);
      llmc::Vec sum = llmc::broadcast(0.0f);
      llmc::for_vectors(count, [&](int64_t i, auto lanes) {
        const llmc::Vec x = llmc::exp(llmc::load(logit + i, lanes) - llmc::load(largest + i, lanes));
        sum += llmc::keep(x * llmc::load(weight + i, lanes), lanes);
      });
      sums[row] = llmc::sum_of(sum);
    }
    float* scores = a.scores + kv_head * a.longest;
    const int64_t reach = a.pool / 2;
    for (int64_t row = 0; row < seen; row++) {
      float sum = 0.0f;
      for (int64_t at = std::max<int64_t>(0, row - reach); at < std::min(seen, row + reach + 1); at++) sum += sums[at];
      scores[row] = sum / static_cast<float>(a.pool * count);
    }
    std::fill(scores + seen, scores + a.longest, 0.0f);
  }
};

template <class T, class K>
void score_keys(LlmcPool* pool, const LlmcScoreKeys& a) {
  const llmc::Compaction request(a.compaction, a.block_size);
  llmc::parallel_for(pool, a.kv_heads, [&](int64_t kv_head, void*) { Head<T, K>(a, request, kv_head).score(); });
}

}  // namespace

LLMC_KERNEL(LlmcScoreKeys, score_keys_f32_f32, score_keys<float, float>)
LLMC_KERNEL(LlmcScoreKeys, score_keys_f32_bf16, score_keys<float, llmc::bf16>)
LLMC_KERNEL(LlmcScoreKeys, score_keys_f32_int8, score_keys<float, llmc::Int8Cache>)
LLMC_KERNEL(LlmcScoreKeys, score_keys_f32_int4, score_keys<float, llmc::Int4Cache>)
LLMC_KERNEL(LlmcScoreKeys, score_keys_f32_fp8, score_keys<float, llmc::Fp8Cache>)
LLMC_KERNEL(LlmcScoreKeys, score_keys_bf16_f32, score_keys<llmc::bf16, float>)
LLMC_KERNEL(LlmcScoreKeys, score_keys_bf16_bf16, score_keys<llmc::bf16, llmc::bf16>)
LLMC_KERNEL(LlmcScoreKeys, score_keys_bf16_int8, score_keys<llmc::bf16, llmc::Int8Cache>)
LLMC_KERNEL(LlmcScoreKeys, score_keys_bf16_int4, score_keys<llmc::bf16, llmc::Int4Cache>)
LLMC_KERNEL(LlmcScoreKeys, score_keys_bf16_fp8, score_keys<llmc::bf16, llmc::Fp8Cache>)
