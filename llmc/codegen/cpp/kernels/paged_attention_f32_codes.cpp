// Attention of fp32 queries over caches of codes.
#include "paged_attention.h"

LLMC_KERNEL(LlmcPagedAttention, paged_attention_f32_int8, llmc::attention::attend<float, llmc::Int8Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_f32_int4, llmc::attention::attend<float, llmc::Int4Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_f32_fp8, llmc::attention::attend<float, llmc::Fp8Cache>)
LLMC_KERNEL(LlmcPagedAttention, paged_attention_f32_int8_int4,
            llmc::attention::attend<float, llmc::Int8Cache, llmc::Int4Cache>)
