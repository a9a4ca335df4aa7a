// llmc::sum_attention: the attention that each of a request's keys has got from all queries (llmc/ops/sum_attention.py).
//
// score[r] = sums[r] + sum over queries and mean over heads of a group of softmax_r(scale * q . k[r]).
#include "key_attention.h"

typedef struct {
  int64_t heads, kv_heads, block_size, half;
  const void* q_first;   // [blocks, heads, block_size, half]
  const void* q_second;
  const void* k_cache;
  const void* sums;      // [blocks, kv_heads, block_size], fp32; of the rows before the queries'
  const int32_t* compaction;
  float scale;
  float softcap;         // 0: none
  int64_t longest;
  int64_t cache_group;   // of codes: channels that share a scale; 0: all of a head's
  float* scores;         // [kv_heads, longest]
} LlmcSumAttention;

namespace {

template <class T, class K>
void sum_head(const LlmcSumAttention& a, const llmc::Compaction& request, int64_t kv_head) {
  const llmc::KeyAttention<T, K, LlmcSumAttention> attention(a, request, kv_head);
  const int64_t before = request.rows - request.queries, size = a.block_size;
  float* scores = a.scores + kv_head * a.longest;
  attention.sum(request.rows, scores);
  for (int64_t row = 0; row < request.rows; row++) {
    scores[row] /= static_cast<float>(attention.group());
    if (row >= before) continue;
    const int64_t of_head = request.blocks[row / size] * a.kv_heads + kv_head;
    scores[row] += static_cast<const float*>(a.sums)[of_head * size + row % size];
  }
  std::fill(scores + request.rows, scores + a.longest, 0.0f);
}

template <class T, class K>
void sum_attention(LlmcPool* pool, const LlmcSumAttention& a) {
  const llmc::Compaction request(a.compaction, a.block_size);
  llmc::parallel_for(pool, a.kv_heads, [&](int64_t kv_head, void*) { sum_head<T, K>(a, request, kv_head); });
}

}  // namespace

LLMC_KERNEL(LlmcSumAttention, sum_attention_f32_f32, sum_attention<float, float>)
LLMC_KERNEL(LlmcSumAttention, sum_attention_f32_bf16, sum_attention<float, llmc::bf16>)
LLMC_KERNEL(LlmcSumAttention, sum_attention_f32_int8, sum_attention<float, llmc::Int8Cache>)
LLMC_KERNEL(LlmcSumAttention, sum_attention_f32_int4, sum_attention<float, llmc::Int4Cache>)
LLMC_KERNEL(LlmcSumAttention, sum_attention_f32_fp8, sum_attention<float, llmc::Fp8Cache>)
LLMC_KERNEL(LlmcSumAttention, sum_attention_bf16_f32, sum_attention<llmc::bf16, float>)
LLMC_KERNEL(LlmcSumAttention, sum_attention_bf16_bf16, sum_attention<llmc::bf16, llmc::bf16>)
LLMC_KERNEL(LlmcSumAttention, sum_attention_bf16_int8, sum_attention<llmc::bf16, llmc::Int8Cache>)
LLMC_KERNEL(LlmcSumAttention, sum_attention_bf16_int4, sum_attention<llmc::bf16, llmc::Int4Cache>)
LLMC_KERNEL(LlmcSumAttention, sum_attention_bf16_fp8, sum_attention<llmc::bf16, llmc::Fp8Cache>)
