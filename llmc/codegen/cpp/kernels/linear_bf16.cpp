// Matrix products of bf16 activations and weights.
#include "linear.h"

void llmc_linear_bf16(LlmcPool* pool, const LlmcLinear* arguments) {
  llmc::linear<llmc::bf16>(pool, *arguments, llmc::LinearEpilogue<llmc::bf16, LlmcLinear>{*arguments});
}

void llmc_gated_linear_bf16(LlmcPool* pool, const LlmcLinear* arguments) {
  llmc::linear<llmc::bf16>(pool, *arguments, llmc::GatedEpilogue<llmc::bf16, LlmcLinear>{*arguments});
}

void llmc_lm_head_bf16(LlmcPool* pool, const LlmcLinear* arguments) {
  llmc::linear<llmc::bf16>(pool, *arguments, llmc::LogitsEpilogue<LlmcLinear>{*arguments});
}
