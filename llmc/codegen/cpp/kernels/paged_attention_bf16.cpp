// Attention of bf16 queries over caches of either type.
#include "paged_attention.h"

LLMC_KERNEL(LlmcPagedAttention, paged_attention_bf16_f32, llmc::attention::attend<llmc::bf16, float>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_bf16_bf16, llmc::attention::attend<llmc::bf16, llmc::bf16>)
