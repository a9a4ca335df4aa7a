// Products of fp32 activations and quantized weights.
#include "quantized_products.h"

void llmc_quantized_linear_f32(LlmcPool* pool, const LlmcQuantizedLinear* arguments) {
  llmc::quantized_linear<float>(pool, *arguments, llmc::LinearEpilogue<float, LlmcQuantizedLinear>{*arguments});
}

void llmc_quantized_gated_linear_f32(LlmcPool* pool, const LlmcQuantizedLinear* arguments) {
  llmc::quantized_linear<float>(pool, *arguments, llmc::GatedEpilogue<float, LlmcQuantizedLinear>{*arguments});
}

void llmc_quantized_lm_head_f32(LlmcPool* pool, const LlmcQuantizedLinear* arguments) {
  llmc::quantized_linear<float>(pool, *arguments, llmc::LogitsEpilogue<LlmcQuantizedLinear>{*arguments});
}
