// Attention of bf16 queries over caches of codes, with the newest keys apart, as numbers.
#include "paged_attention.h"

LLMC_KERNEL(LlmcPagedAttention, paged_attention_bf16_int8_bf16,
            llmc::attention::attend_newest<llmc::bf16, llmc::bf16, llmc::Int8Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_bf16_int4_bf16,
            llmc::attention::attend_newest<llmc::bf16, llmc::bf16, llmc::Int4Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_bf16_fp8_bf16,
            llmc::attention::attend_newest<llmc::bf16, llmc::bf16, llmc::Fp8Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_bf16_int8_int4_bf16,
            llmc::attention::attend_newest<llmc::bf16, llmc::bf16, llmc::Int8Cache, llmc::Int4Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_bf16_int8_f32,
            llmc::attention::attend_newest<float, llmc::bf16, llmc::Int8Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_bf16_int4_f32,
            llmc::attention::attend_newest<float, llmc::bf16, llmc::Int4Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_bf16_fp8_f32,
            llmc::attention::attend_newest<float, llmc::bf16, llmc::Fp8Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_bf16_int8_int4_f32,
            llmc::attention::attend_newest<float, llmc::bf16, llmc::Int8Cache, llmc::Int4Cache>)
