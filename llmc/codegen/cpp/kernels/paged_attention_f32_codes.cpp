// Attention of fp32 queries over caches of codes.
#include "paged_attention.h"

void llmc_paged_attention_f32_int8(LlmcPool* pool, const LlmcPagedAttention* arguments) {
  llmc::attention::attend<float, llmc::Int8Cache>(pool, *arguments);
}

void llmc_paged_attention_f32_int4(LlmcPool* pool, const LlmcPagedAttention* arguments) {
  llmc::attention::attend<float, llmc::Int4Cache>(pool, *arguments);
}

void llmc_paged_attention_f32_fp8(LlmcPool* pool, const LlmcPagedAttention* arguments) {
  llmc::attention::attend<float, llmc::Fp8Cache>(pool, *arguments);
}
