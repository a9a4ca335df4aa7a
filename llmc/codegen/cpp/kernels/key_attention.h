// How much attention a request's last queries pay to each of its keys: the inside of score_keys, sum_attention and others.
//
// Two passes over the keys, each of which is decoded once for all queries: the first one finds the largest logit and the
// sum of each query's softmax.
#pragma once
#include <cmath>
#include <limits>

#include "activation.h"
#include "cached_codes.h"
#include "compaction.h"

namespace llmc {

constexpr int64_t kMostPairs = 4096;  // of a query and a head; llmc/codegen/cpp/compaction_kernels.py

template <class T>
float dot_of(const T* a, const float* b, int64_t channels) {
  Vec sum = broadcast(0.0f);
  for_vectors(channels, [&](int64_t c, auto lanes) { sum += keep(load(a + c, lanes) * load(b + c, lanes), lanes); });
  return sum_of(sum);
}

// One KV head. Arguments: a struct with heads, kv_heads, block_size, half, q_first, q_second, k_cache, scale, softcap and
// cache_group.
template <class T, class K, class Arguments>
struct KeyAttention {
  const Arguments& a;
  const Compaction& request;
  Cache<K> cache;
  int64_t kv_head;
  int64_t chunk;  // the row from which on each query sees all keys and no others; negative: it sees those up to its own

  KeyAttention(const Arguments& a, const Compaction& request, int64_t kv_head, int64_t chunk = -1)
      : a(a),
        request(request),
        cache(2 * a.half, a.block_size, a.cache_group),
        kv_head(kv_head),
        chunk(chunk) {}

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
    decode(cache, cache.row(data, row % a.block_size), key);
    for (int64_t query = 0, pair = 0; query < request.queries; query++) {
      const bool sees = chunk >= 0 || row <= request.rows - request.queries + query;
      for (int64_t g = 0; g < group(); g++, pair++) {
        if (!sees) {
          to[pair] = -std::numeric_limits<float>::infinity();
          continue;
        }
        const int64_t first = 2 * (kv_head * group() + g);
        float logit = dot_of(half(query, first), key, a.half) + dot_of(half(query, first + 1), key + a.half, a.half);
        logit *= a.scale;
        to[pair] = a.softcap > 0.0f ? a.softcap * std::tanh(logit / a.softcap) : logit;
      }
    }
  }

  // The first row that any query sees.
  int64_t first() const { return std::max<int64_t>(0, chunk); }

  // The attention that all queries and heads together pay to each of the rows from the first one to before `last`.
  void sum(int64_t last, float* sums) const {
    float logit[kMostPairs], largest[kMostPairs], weight[kMostPairs];
    const int64_t count = pairs();
    std::fill(largest, largest + count, -std::numeric_limits<float>::infinity());
    std::fill(weight, weight + count, 0.0f);
    for (int64_t row = first(); row < request.rows; row++) {
      logits(row, logit);
      for (int64_t i = 0; i < count; i++) {
        if (logit[i] > largest[i]) {
          weight[i] *= std::exp(largest[i] - logit[i]);
          largest[i] = logit[i];
        }
      }
      for_vectors(count, [&](int64_t i, auto lanes) {
        const Vec x = llmc::exp(load(logit + i, lanes) - load(largest + i, lanes));
        store(weight + i, load(weight + i, lanes) + x, lanes);
      });
    }
    for (int64_t i = 0; i < count; i++) weight[i] = 1.0f / weight[i];
    for (int64_t row = first(); row < last; row++) {
      logits(row, logit);
      Vec sum = broadcast(0.0f);
      for_vectors(count, [&](int64_t i, auto lanes) {
        const Vec x = llmc::exp(load(logit + i, lanes) - load(largest + i, lanes));
        sum += keep(x * load(weight + i, lanes), lanes);
      });
      sums[row] = sum_of(sum);
    }
  }
};

}  // namespace llmc
