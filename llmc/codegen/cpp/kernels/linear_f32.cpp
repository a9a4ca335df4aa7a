// Matrix products of fp32 activations and weights.
#include "experts.h"
#include "head_linear.h"

LLMC_KERNEL(LlmcLinear, linear_f32, llmc::linear<float>)
LLMC_KERNEL(LlmcLinear, gated_linear_f32, llmc::gated_linear<float>)
LLMC_KERNEL(LlmcLinear, expert_linear_f32, llmc::expert_linear<float>)
LLMC_KERNEL(LlmcLinear, head_linear_f32, llmc::head_linear<float>)
LLMC_KERNEL(LlmcLinear, lm_head_f32, llmc::lm_head<float>)

int64_t llmc_linear_scratch(int64_t max_tokens, int64_t max_in) {
  return llmc::linear_scratch_bytes(max_tokens, max_in);
}
