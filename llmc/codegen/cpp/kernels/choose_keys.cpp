// llmc::paged_choose_keys: which keys of its request each token's attention sees.
//
// score[s] = sum over heads h of weights[h] * max(0, q[h] . k[s]); the places of the `count` largest, in order.
#include <algorithm>

#include "cached_rows.h"
#include "row.h"
#include "visible_rows.h"

typedef struct {
  int64_t tokens, requests, heads, head_dim, half, block_size;
  LlmcRows q;      // [tokens, heads * head_dim]
  const float* weights;  // [tokens, heads]
  const void* k_cache;   // the first `half` channels of keys
  const void* v_cache;   // the others
  const int32_t* query_starts;  // [requests + 1]
  const int32_t* context_lens;  // [requests]
  const int32_t* block_tables;  // [requests, max_blocks]
  int64_t max_blocks;
  int64_t count;
  const int64_t* tree_masks;  // [tokens], as of LlmcPagedAttention
  float* scores;  // [tokens, count], of the places in y
  LlmcRows y;     // [tokens, count] int32
} LlmcPagedChooseKeys;

namespace {

constexpr int32_t kNoPlace = INT32_MAX;

// The best keys until now: a heap with the worst in front. Places arrive in ascending order, so a key that ties with
// the worst comes later and is not inserted.
struct Best {
  float* scores;
  int32_t* places;
  int64_t most, count = 0;

  bool worse(int64_t a, int64_t b) const {
    return scores[a] != scores[b] ? scores[a] < scores[b] : places[a] > places[b];
  }
  void swap(int64_t a, int64_t b) {
    std::swap(scores[a], scores[b]);
    std::swap(places[a], places[b]);
  }
  void add(float score, int32_t place) {
    if (count == most) {
      if (score <= scores[0]) return;
      scores[0] = score;
      places[0] = place;
      for (int64_t at = 0;;) {
        int64_t worst = at;
        for (int64_t child = 2 * at + 1; child < std::min(count, 2 * at + 3); child++)
          if (worse(child, worst)) worst = child;
        if (worst == at) return;
        swap(at, worst);
        at = worst;
      }
    }
    int64_t at = count++;
    scores[at] = score;
    places[at] = place;
    for (; at > 0 && worse(at, (at - 1) / 2); at = (at - 1) / 2) swap(at, (at - 1) / 2);
  }
};

template <class T, class K>
float dot(const T* a, const K* b, int64_t channels) {
  llmc::Vec sum = llmc::broadcast(0.0f);
  llmc::for_vectors(channels, [&](int64_t c, auto lanes) { sum += llmc::load(a + c, lanes) * llmc::load(b + c, lanes); });
  return llmc::sum_of(sum);
}

template <class T, class K>
void choose(const LlmcPagedChooseKeys& a, int64_t request, int64_t token) {
  const int64_t own = a.context_lens[request] - (a.query_starts[request + 1] - token);
  const uint64_t hidden = a.tree_masks == nullptr ? 0 : static_cast<uint64_t>(a.tree_masks[token]);
  int32_t* y = llmc::row_of<int32_t>(a.y, token);
  Best best{a.scores + token * a.count, y, a.count};
  const int32_t* blocks = a.block_tables + request * a.max_blocks;
  const int64_t rest = a.head_dim - a.half;
  const llmc::VisibleRows rows{own, hidden};
  rows.for_runs(0, rows.count(), [&](int64_t first, int64_t place, int64_t number) {
    for (int64_t i = 0; i < number; i++) {
      const int64_t row = first + i, slot = blocks[row / a.block_size] * a.block_size + row % a.block_size;
      const K* k = static_cast<const K*>(a.k_cache) + slot * a.half;
      const K* v = static_cast<const K*>(a.v_cache) + slot * rest;
      float score = 0.0f;
      for (int64_t h = 0; h < a.heads; h++) {
        const T* q = llmc::row_of<const T>(a.q, token) + h * a.head_dim;
        const float product = dot(q, k, a.half) + dot(q + a.half, v, rest);
        score += a.weights[token * a.heads + h] * std::max(0.0f, product);
      }
      best.add(score, static_cast<int32_t>(place + i));
    }
  });
  std::fill(y + best.count, y + a.count, kNoPlace);
  std::sort(y, y + best.count);
}

template <class T, class K>
void paged_choose_keys(LlmcPool* pool, const LlmcPagedChooseKeys& a) {
  llmc::parallel_for(pool, a.tokens, [&](int64_t token, void*) {
    const int32_t* next = std::upper_bound(a.query_starts, a.query_starts + a.requests + 1, token);
    choose<T, K>(a, next - a.query_starts - 1, token);
  });
}

}  // namespace

LLMC_KERNEL(LlmcPagedChooseKeys, paged_choose_keys_f32_f32, paged_choose_keys<float, float>)
LLMC_KERNEL(LlmcPagedChooseKeys, paged_choose_keys_f32_bf16, paged_choose_keys<float, llmc::bf16>)
LLMC_KERNEL(LlmcPagedChooseKeys, paged_choose_keys_bf16_f32, paged_choose_keys<llmc::bf16, float>)
LLMC_KERNEL(LlmcPagedChooseKeys, paged_choose_keys_bf16_bf16, paged_choose_keys<llmc::bf16, llmc::bf16>)
