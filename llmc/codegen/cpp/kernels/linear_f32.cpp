// Matrix products of fp32 activations and weights.
#include "linear.h"

void llmc_linear_f32(LlmcPool* pool, const LlmcLinear* arguments) {
  llmc::linear<float>(pool, *arguments, llmc::LinearEpilogue<float, LlmcLinear>{*arguments});
}

void llmc_gated_linear_f32(LlmcPool* pool, const LlmcLinear* arguments) {
  llmc::linear<float>(pool, *arguments, llmc::GatedEpilogue<float, LlmcLinear>{*arguments});
}

void llmc_lm_head_f32(LlmcPool* pool, const LlmcLinear* arguments) {
  llmc::linear<float>(pool, *arguments, llmc::LogitsEpilogue<LlmcLinear>{*arguments});
}

int64_t llmc_linear_scratch(int64_t max_tokens, int64_t max_in) {
  return llmc::linear_scratch_bytes(max_tokens, max_in);
}
