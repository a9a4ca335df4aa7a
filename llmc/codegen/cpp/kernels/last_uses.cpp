// llmc::last_uses: when the queries of a request last used each block of its rows (llmc/ops/last_uses.py).
//
// A block that gets at least its share of the attention of these queries, and each new block, is used in this update: its
// rows have the update's number plus that share. The rows of other blocks keep what they have.
#include <cmath>

#include "key_attention.h"

typedef struct {
  int64_t heads, kv_heads, block_size, half;
  const void* q_first;   // [blocks, heads, block_size, half]
  const void* q_second;
  const void* k_cache;
  const void* sums;      // [blocks, kv_heads, block_size], fp32; the uses of the rows before the queries'
  const int32_t* compaction;
  float scale;
  float softcap;         // 0: none
  int64_t longest;
  int64_t cache_group;   // of codes: channels that share a scale; 0: all of a head's
  float* scores;         // [kv_heads, longest]
} LlmcLastUses;

namespace {

template <class T, class K>
void use_head(const LlmcLastUses& a, const llmc::Compaction& request, int64_t kv_head) {
  const llmc::KeyAttention<T, K, LlmcLastUses> attention(a, request, kv_head);
  const int64_t size = a.block_size, count = request.rows / size, old = (request.rows - request.queries) / size;
  float* scores = a.scores + kv_head * a.longest;
  attention.sum(request.rows, scores);
  const auto before = [&](int64_t block) {
    return static_cast<const float*>(a.sums)[(request.blocks[block] * a.kv_heads + kv_head) * size];
  };
  float now = 0.0f;
  for (int64_t block = 0; block < old; block++) now = std::max(now, before(block));
  now = std::floor(now) + 1.0f;
  for (int64_t block = 0; block < count; block++) {
    float* rows = scores + block * size;
    float share = 0.0f;
    for (int64_t row = 0; row < size; row++) share += rows[row];
    share /= static_cast<float>(attention.pairs());
    const bool is_used = block >= old || share >= 1.0f / static_cast<float>(count);
    std::fill(rows, rows + size, is_used ? now + std::min(share, 0.999f) : before(block));
  }
  std::fill(scores + request.rows, scores + a.longest, 0.0f);
}

template <class T, class K>
void last_uses(LlmcPool* pool, const LlmcLastUses& a) {
  const llmc::Compaction request(a.compaction, a.block_size);
  llmc::parallel_for(pool, a.kv_heads, [&](int64_t kv_head, void*) { use_head<T, K>(a, request, kv_head); });
}

}  // namespace

LLMC_KERNEL(LlmcLastUses, last_uses_f32_f32, last_uses<float, float>)
LLMC_KERNEL(LlmcLastUses, last_uses_f32_bf16, last_uses<float, llmc::bf16>)
LLMC_KERNEL(LlmcLastUses, last_uses_f32_int8, last_uses<float, llmc::Int8Cache>)
LLMC_KERNEL(LlmcLastUses, last_uses_f32_int4, last_uses<float, llmc::Int4Cache>)
LLMC_KERNEL(LlmcLastUses, last_uses_f32_fp8, last_uses<float, llmc::Fp8Cache>)
LLMC_KERNEL(LlmcLastUses, last_uses_bf16_f32, last_uses<llmc::bf16, float>)
LLMC_KERNEL(LlmcLastUses, last_uses_bf16_bf16, last_uses<llmc::bf16, llmc::bf16>)
LLMC_KERNEL(LlmcLastUses, last_uses_bf16_int8, last_uses<llmc::bf16, llmc::Int8Cache>)
LLMC_KERNEL(LlmcLastUses, last_uses_bf16_int4, last_uses<llmc::bf16, llmc::Int4Cache>)
LLMC_KERNEL(LlmcLastUses, last_uses_bf16_fp8, last_uses<llmc::bf16, llmc::Fp8Cache>)
