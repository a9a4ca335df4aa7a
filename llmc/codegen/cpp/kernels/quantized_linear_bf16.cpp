// Products of bf16 activations and quantized weights.
#include "quantized_products.h"

LLMC_KERNEL(LlmcQuantizedLinear, quantized_linear_bf16, llmc::quantized_linear<llmc::bf16>)
LLMC_KERNEL(LlmcQuantizedLinear, quantized_gated_linear_bf16, llmc::quantized_gated_linear<llmc::bf16>)
LLMC_KERNEL(LlmcQuantizedLinear, quantized_expert_linear_bf16, llmc::quantized_expert_linear<llmc::bf16>)
LLMC_KERNEL(LlmcQuantizedLinear, quantized_lm_head_bf16, llmc::quantized_lm_head<llmc::bf16>)
