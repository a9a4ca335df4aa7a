// Attention of bf16 queries over caches of codes.
#include "paged_attention.h"

void llmc_paged_attention_bf16_int8(LlmcPool* pool, const LlmcPagedAttention* arguments) {
  llmc::attention::attend<llmc::bf16, llmc::Int8Cache>(pool, *arguments);
}

void llmc_paged_attention_bf16_int4(LlmcPool* pool, const LlmcPagedAttention* arguments) {
  llmc::attention::attend<llmc::bf16, llmc::Int4Cache>(pool, *arguments);
}

void llmc_paged_attention_bf16_fp8(LlmcPool* pool, const LlmcPagedAttention* arguments) {
  llmc::attention::attend<llmc::bf16, llmc::Fp8Cache>(pool, *arguments);
}
