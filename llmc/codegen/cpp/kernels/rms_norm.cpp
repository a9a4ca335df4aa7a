// llmc::rms_norm and llmc::add_rms_norm. Source: Zhang and Sennrich 2019.
#include "norm_row.h"

void llmc_rms_norm_f32(LlmcPool* pool, const LlmcNorm* arguments) { llmc::norm<false, float>(pool, *arguments); }
void llmc_rms_norm_bf16(LlmcPool* pool, const LlmcNorm* arguments) { llmc::norm<false, llmc::bf16>(pool, *arguments); }
