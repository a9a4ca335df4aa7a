// llmc::score_keys: how much attention a request's last queries pay to each of its keys (llmc/ops/score_keys.py).
//
// score[r] = mean over neighbours of r, queries and heads of a group of softmax_r(scale * q . k[r]).
#include "key_attention.h"

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

template <class T, class K>
void score_head(const LlmcScoreKeys& a, const llmc::Compaction& request, int64_t kv_head) {
  const llmc::KeyAttention<T, K, LlmcScoreKeys> attention(a, request, kv_head);
  const int64_t seen = request.rows - request.queries, reach = a.pool / 2;
  float* sums = a.sums + kv_head * a.longest;
  float* scores = a.scores + kv_head * a.longest;
  attention.sum(seen, sums);
  for (int64_t row = 0; row < seen; row++) {
    float sum = 0.0f;
    for (int64_t at = std::max<int64_t>(0, row - reach); at < std::min(seen, row + reach + 1); at++) sum += sums[at];
    scores[row] = sum / static_cast<float>(a.pool * attention.pairs());
  }
  std::fill(scores + seen, scores + a.longest, 0.0f);
}

template <class T, class K>
void score_keys(LlmcPool* pool, const LlmcScoreKeys& a) {
  const llmc::Compaction request(a.compaction, a.block_size);
  llmc::parallel_for(pool, a.kv_heads, [&](int64_t kv_head, void*) { score_head<T, K>(a, request, kv_head); });
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
