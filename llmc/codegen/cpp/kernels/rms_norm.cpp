// llmc::rms_norm and llmc::add_rms_norm. Source: Zhang and Sennrich 2019.
#include "norm_row.h"

LLMC_KERNEL(LlmcNorm, rms_norm_f32, llmc::norm<false, float>)
LLMC_KERNEL(LlmcNorm, rms_norm_bf16, llmc::norm<false, llmc::bf16>)
