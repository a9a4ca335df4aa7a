// How much attention a request's last queries pay to each of its keys: the inside of score_keys, sum_attention and others.
//
// Keys are read in tiles of kLanes rows, whose channels lie next to each other, so that a vector has the logits of a
// tile's rows. Two passes over the keys for each part of the queries: the first one finds the largest logit and the sum
// of each query's softmax.
#pragma once
#include <algorithm>

#include "activation.h"
#include "cached_codes.h"
#include "compaction.h"

namespace llmc {

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
  int64_t pairs() const { return request.queries * group(); }  // of a query and a head
  int64_t first() const { return std::max<int64_t>(0, chunk); }  // row that any query sees

  // The attention that all queries and heads together pay to each of the rows from the first one to before `last`.
  void sum(int64_t last, float* sums) const { join<false>(last, sums); }

  // The largest attention that one of them pays to each of these rows.
  void peak(int64_t last, float* peaks) const { join<true>(last, peaks); }

 private:
  static constexpr int64_t kPairs = 256;
  static constexpr int64_t kChannels = 32768;  // of a part's queries
  static constexpr int kAtOnce = 4;
  static constexpr float kUnseen = -1e30f;

  // Pairs of a query and a head.
  struct Part {
    int64_t begin, count;
    float queries[kChannels];
    Vec largest[kPairs], weight[kPairs];  // of each lane, then of all
  };

  // found: the sums of each row's attention, or with kPeaks its maxima.
  template <bool kPeaks>
  void join(int64_t last, float* found) const {
    std::fill(found + first(), found + last, 0.0f);
    Part part;
    for (int64_t begin = 0; begin < pairs(); begin += part.count) {
      part.begin = begin;
      part.count = std::min({pairs() - begin, kPairs, kChannels / (2 * a.half)});
      add<kPeaks>(part, last, found);
    }
  }

  template <bool kPeaks>
  void add(Part& part, int64_t last, float* found) const {
    float tile[LLMC_CODED_HEAD * kLanes];
    for (int64_t pair = 0; pair < part.count; pair++) {
      read_query(part.begin + pair, part.queries + pair * 2 * a.half);
      part.largest[pair] = broadcast(kUnseen);
      part.weight[pair] = broadcast(0.0f);
    }
    for (int64_t row = first(); row < request.rows; row += kLanes) {
      read_tile(row, tile);
      for_logits(part, row, tile, [&](int64_t pair, Vec logit) {
        const Vec before = part.largest[pair], largest = maximum(before, logit);
        part.weight[pair] = part.weight[pair] * llmc::exp(before - largest) + llmc::exp(logit - largest);
        part.largest[pair] = largest;
      });
    }
    for (int64_t pair = 0; pair < part.count; pair++) {
      const float largest = maximum_of(part.largest[pair]);
      const float weight = sum_of(part.weight[pair] * llmc::exp(part.largest[pair] - largest));
      part.largest[pair] = broadcast(largest);
      part.weight[pair] = broadcast(1.0f / weight);
    }
    for (int64_t row = first(); row < last; row += kLanes) {
      read_tile(row, tile);
      Vec joined = broadcast(0.0f);
      for_logits(part, row, tile, [&](int64_t pair, Vec logit) {
        const Vec share = llmc::exp(logit - part.largest[pair]) * part.weight[pair];
        joined = kPeaks ? maximum(joined, share) : joined + share;
      });
      const int64_t lanes = std::min<int64_t>(kLanes, last - row);
      const Vec before = load(found + row, lanes);
      store(found + row, kPeaks ? maximum(before, joined) : before + joined, lanes);
    }
  }

  // Calls each(pair, logits of the tile's rows) for the pairs of a part that see some of them.
  template <class Each>
  void for_logits(const Part& part, int64_t row, const float* tile, const Each& each) const {
    const int64_t channels = 2 * a.half;
    for (int64_t pair = 0; pair < part.count; pair += kAtOnce) {
      const int64_t count = std::min<int64_t>(kAtOnce, part.count - pair);
      const float* queries[kAtOnce];
      for (int64_t i = 0; i < kAtOnce; i++) queries[i] = part.queries + (pair + std::min(i, count - 1)) * channels;
      Vec sums[kAtOnce] = {};
      for (int64_t c = 0; c < channels; c++) {
        const Vec key = load(tile + c * kLanes);
        for (int i = 0; i < kAtOnce; i++) sums[i] = fma(broadcast(queries[i][c]), key, sums[i]);
      }
      for (int64_t i = 0; i < count; i++) {
        const int64_t query = (part.begin + pair + i) / group();
        const int64_t end = chunk >= 0 ? request.rows : request.rows - request.queries + query + 1;
        if (row < end) each(pair + i, seen(sums[i] * a.scale, end - row));
      }
    }
  }

  // Logits with the softcap, and those from lane `count` on unseen.
  Vec seen(Vec logit, int64_t count) const {
    if (a.softcap > 0.0f) logit = a.softcap * llmc::tanh(logit / a.softcap);
    if (count >= kLanes) return logit;
    float lanes[kLanes];
    store(lanes, logit);
    std::fill(lanes + count, lanes + kLanes, kUnseen);
    return load(lanes);
  }

  void read_query(int64_t pair, float* to) const {
    const int64_t slot = request.slots[pair / group()], size = a.block_size;
    for (int64_t i = 0; i < 2; i++) {
      const int64_t half = 2 * (kv_head * group() + pair % group()) + i, head = half % a.heads;
      const auto* from = static_cast<const T*>(half < a.heads ? a.q_first : a.q_second);
      const T* x = from + ((slot / size * a.heads + head) * size + slot % size) * a.half;
      for_vectors(a.half, [&](int64_t c, auto lanes) { store(to + i * a.half + c, load(x + c, lanes), lanes); });
    }
  }

  // tile: [channels, kLanes], of the rows from `row` on; zero from the request's end on.
  void read_tile(int64_t row, float* tile) const {
    float key[LLMC_CODED_HEAD];
    const int64_t channels = 2 * a.half;
    for (int64_t lane = 0; lane < kLanes; lane++) {
      if (row + lane < request.rows) {
        const int64_t block = request.blocks[(row + lane) / a.block_size];
        const auto* data = static_cast<const uint8_t*>(a.k_cache) + (block * a.kv_heads + kv_head) * cache.head_bytes();
        decode(cache, cache.row(data, (row + lane) % a.block_size), key);
      } else {
        std::fill(key, key + channels, 0.0f);
      }
      for (int64_t c = 0; c < channels; c++) tile[c * kLanes + lane] = key[c];
    }
  }
};

}  // namespace llmc
