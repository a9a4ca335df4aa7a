// Attention of fp32 queries over caches of codes, with the newest keys apart, as numbers.
#include "paged_attention.h"

LLMC_KERNEL(LlmcPagedAttention, paged_attention_f32_int8_bf16,
            llmc::attention::attend_newest<llmc::bf16, float, llmc::Int8Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_f32_int4_bf16,
            llmc::attention::attend_newest<llmc::bf16, float, llmc::Int4Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_f32_fp8_bf16,
            llmc::attention::attend_newest<llmc::bf16, float, llmc::Fp8Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_f32_int8_int4_bf16,
            llmc::attention::attend_newest<llmc::bf16, float, llmc::Int8Cache, llmc::Int4Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_f32_int8_f32,
            llmc::attention::attend_newest<float, float, llmc::Int8Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_f32_int4_f32,
            llmc::attention::attend_newest<float, float, llmc::Int4Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_f32_fp8_f32,
            llmc::attention::attend_newest<float, float, llmc::Fp8Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_f32_int8_int4_f32,
            llmc::attention::attend_newest<float, float, llmc::Int8Cache, llmc::Int4Cache>)
