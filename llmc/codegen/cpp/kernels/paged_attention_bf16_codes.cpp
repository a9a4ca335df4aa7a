// Attention of bf16 queries over caches of codes.
#include "paged_attention.h"

LLMC_KERNEL(LlmcPagedAttention, paged_attention_bf16_int8, llmc::attention::attend<llmc::bf16, llmc::Int8Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_bf16_int4, llmc::attention::attend<llmc::bf16, llmc::Int4Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_bf16_fp8, llmc::attention::attend<llmc::bf16, llmc::Fp8Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_bf16_int8_int4,
            llmc::attention::attend<llmc::bf16, llmc::Int8Cache, llmc::Int4Cache>)
