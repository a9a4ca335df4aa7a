// Products of fp32 activations and quantized weights.
#include "quantized_products.h"

LLMC_KERNEL(LlmcQuantizedLinear, quantized_linear_f32, llmc::quantized_linear<float>)
LLMC_KERNEL(LlmcQuantizedLinear, quantized_gated_linear_f32, llmc::quantized_gated_linear<float>)
LLMC_KERNEL(LlmcQuantizedLinear, quantized_expert_linear_f32, llmc::quantized_expert_linear<float>)
LLMC_KERNEL(LlmcQuantizedLinear, quantized_lm_head_f32, llmc::quantized_lm_head<float>)
