// llmc::peak_attention: the largest attention that a query of a second reading has paid to each of a request's keys
// (llmc/ops/peak_attention.py).
//
// score[r] = max(sums[r], max over queries and heads of a group of softmax_r(scale * q . k[r])), -1 from `tokens` on.
#include "key_attention.h"

typedef struct {
  int64_t heads, kv_heads, block_size, half;
  const void* q_first;   // [blocks, heads, block_size, half]
  const void* q_second;
  const void* k_cache;
  const void* sums;      // [blocks, kv_heads, block_size], fp32; the maxima until now
  const int32_t* compaction;
  float scale;
  float softcap;         // 0: none
  int64_t longest;
  int64_t cache_group;   // of codes: channels that share a scale; 0: all of a head's
  float* scores;         // [kv_heads, longest]
} LlmcPeakAttention;

namespace {

constexpr float kNever = -1.0f;  // the score of a row that is never kept

template <class T, class K>
void peak_head(const LlmcPeakAttention& a, const llmc::Compaction& request, int64_t kv_head) {
  const llmc::KeyAttention<T, K, LlmcPeakAttention> attention(a, request, kv_head);
  const int64_t own = request.tokens, size = a.block_size;
  float* scores = a.scores + kv_head * a.longest;
  attention.peak(own, scores);
  for (int64_t row = 0; row < own && request.queries > 0; row++) {
    const int64_t of_head = request.blocks[row / size] * a.kv_heads + kv_head;
    scores[row] = std::max(scores[row], static_cast<const float*>(a.sums)[of_head * size + row % size]);
  }
  std::fill(scores + own, scores + request.rows, kNever);
  std::fill(scores + request.rows, scores + a.longest, 0.0f);
}

template <class T, class K>
void peak_attention(LlmcPool* pool, const LlmcPeakAttention& a) {
  const llmc::Compaction request(a.compaction, a.block_size);
  llmc::parallel_for(pool, a.kv_heads, [&](int64_t kv_head, void*) { peak_head<T, K>(a, request, kv_head); });
}

}  // namespace

LLMC_KERNEL(LlmcPeakAttention, peak_attention_f32_f32, peak_attention<float, float>)
LLMC_KERNEL(LlmcPeakAttention, peak_attention_f32_bf16, peak_attention<float, llmc::bf16>)
LLMC_KERNEL(LlmcPeakAttention, peak_attention_f32_int8, peak_attention<float, llmc::Int8Cache>)
LLMC_KERNEL(LlmcPeakAttention, peak_attention_f32_int4, peak_attention<float, llmc::Int4Cache>)
LLMC_KERNEL(LlmcPeakAttention, peak_attention_f32_fp8, peak_attention<float, llmc::Fp8Cache>)
LLMC_KERNEL(LlmcPeakAttention, peak_attention_bf16_f32, peak_attention<llmc::bf16, float>)
LLMC_KERNEL(LlmcPeakAttention, peak_attention_bf16_bf16, peak_attention<llmc::bf16, llmc::bf16>)
LLMC_KERNEL(LlmcPeakAttention, peak_attention_bf16_int8, peak_attention<llmc::bf16, llmc::Int8Cache>)
LLMC_KERNEL(LlmcPeakAttention, peak_attention_bf16_int4, peak_attention<llmc::bf16, llmc::Int4Cache>)
LLMC_KERNEL(LlmcPeakAttention, peak_attention_bf16_fp8, peak_attention<llmc::bf16, llmc::Fp8Cache>)
