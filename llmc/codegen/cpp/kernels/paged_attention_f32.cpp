// Attention of fp32 queries over caches of either type.
#include "paged_attention.h"

LLMC_KERNEL(LlmcPagedAttention, paged_attention_f32_f32, llmc::attention::attend<float, float>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_f32_bf16, llmc::attention::attend<float, llmc::bf16>)

int64_t llmc_paged_attention_scratch(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t value_dim) {
  (void)heads, (void)kv_heads;  // a tile has the same number of rows for any grouping
  return llmc::attention::scratch_bytes(head_dim, value_dim);
}
