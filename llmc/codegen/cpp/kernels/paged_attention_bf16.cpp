// Attention of bf16 queries over caches of either type.
#include "paged_attention.h"

void llmc_paged_attention_bf16_f32(LlmcPool* pool, const LlmcPagedAttention* arguments) {
  llmc::attention::attend<llmc::bf16, float>(pool, *arguments);
}

void llmc_paged_attention_bf16_bf16(LlmcPool* pool, const LlmcPagedAttention* arguments) {
  llmc::attention::attend<llmc::bf16, llmc::bf16>(pool, *arguments);
}
