// Matrix products of bf16 activations and weights.
#include "experts.h"
#include "head_linear.h"

LLMC_KERNEL(LlmcLinear, linear_bf16, llmc::linear<llmc::bf16>)
LLMC_KERNEL(LlmcLinear, gated_linear_bf16, llmc::gated_linear<llmc::bf16>)
LLMC_KERNEL(LlmcLinear, expert_linear_bf16, llmc::expert_linear<llmc::bf16>)
LLMC_KERNEL(LlmcLinear, head_linear_bf16, llmc::head_linear<llmc::bf16>)
LLMC_KERNEL(LlmcLinear, lm_head_bf16, llmc::lm_head<llmc::bf16>)
