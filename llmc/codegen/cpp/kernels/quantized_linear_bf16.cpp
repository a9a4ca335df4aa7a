// Products of bf16 activations and quantized weights.
#include "quantized_products.h"

void llmc_quantized_linear_bf16(LlmcPool* pool, const LlmcQuantizedLinear* arguments) {
  llmc::quantized_linear<llmc::bf16>(pool, *arguments, llmc::LinearEpilogue<llmc::bf16, LlmcQuantizedLinear>{*arguments});
}

void llmc_quantized_gated_linear_bf16(LlmcPool* pool, const LlmcQuantizedLinear* arguments) {
  llmc::quantized_linear<llmc::bf16>(pool, *arguments, llmc::GatedEpilogue<llmc::bf16, LlmcQuantizedLinear>{*arguments});
}

void llmc_quantized_lm_head_bf16(LlmcPool* pool, const LlmcQuantizedLinear* arguments) {
  llmc::quantized_linear<llmc::bf16>(pool, *arguments, llmc::LogitsEpilogue<LlmcQuantizedLinear>{*arguments});
}
