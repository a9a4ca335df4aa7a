// Matrix products of activations and weights of one type.
#include "experts.h"
#include "head_linear.h"

LLMC_KERNELS(LlmcLinear, linear, llmc::linear)
LLMC_KERNELS(LlmcLinear, gated_linear, llmc::gated_linear)
LLMC_KERNELS(LlmcLinear, expert_linear, llmc::expert_linear)
LLMC_KERNELS(LlmcLinear, head_linear, llmc::head_linear)
LLMC_KERNELS(LlmcLinear, lm_head, llmc::lm_head)

int64_t llmc_linear_scratch(int64_t max_tokens, int64_t max_in) {
  return llmc::linear_scratch_bytes(max_tokens, max_in);
}
