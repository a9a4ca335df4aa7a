// Which inner loop multiplies weights of a format and activations: for quantized_linear_*.cpp.
#pragma once
#include "experts.h"
#include "quantized_linear.h"

namespace llmc {

#if defined(__AVX512BF16__)
template <class T, class Codes>
using OperandsOf = std::conditional_t<std::is_same_v<T, bf16>, PairOperands<Codes>, FloatOperands<Codes>>;
#else
template <class T, class Codes>
using OperandsOf = FloatOperands<Codes>;
#endif

// The fastest exact product of integers.
template <class T, class Codes, class Epilogue>
void integer_linear(LlmcPool* pool, const LlmcQuantizedLinear& a, const Epilogue& epilogue) {
#if defined(__AMX_INT8__)
  const CodePanels panels(a, a.in);
  if (a.tokens >= kLeastTiled && fits_tiles<Codes>(panels))
    return quantized_product<TiledProduct<Codes>, T>(pool, a, epilogue);
#endif
  quantized_product<IntegerProduct<Codes>, T>(pool, a, epilogue);
}

template <class T, class Epilogue>
void coded_product(LlmcPool* pool, const LlmcQuantizedLinear& a, const Epilogue& epilogue) {
  const auto multiply = [&](auto product) { quantized_product<decltype(product), T>(pool, a, epilogue); };
  const auto format = static_cast<LlmcCodes>(a.format);
  if (a.x_format == LLMC_X_INT8)
    return format == LLMC_INT4 ? integer_linear<T, Int4Codes>(pool, a, epilogue)
                               : integer_linear<T, Int8Codes>(pool, a, epilogue);
  switch (format) {
    case LLMC_INT8:
    case LLMC_INT6:
    case LLMC_INT5:
      return multiply(FloatProduct<OperandsOf<T, Int8Codes>>{});
    case LLMC_INT4:
      if (!a.has_zeros) return multiply(FloatProduct<OperandsOf<T, SymmetricInt4Codes>>{});
      return multiply(FloatProduct<OperandsOf<T, Int4Codes>>{});
    case LLMC_FP8:
      return multiply(FloatProduct<OperandsOf<T, Fp8Codes>>{});
    case LLMC_NF4:  // its values need all of fp32
      return multiply(FloatProduct<FloatOperands<Nf4Codes>>{});
    case LLMC_MXFP4:
      return multiply(FloatProduct<OperandsOf<T, E2m1Codes>>{});
  }
}

template <class T>
void quantized_linear(LlmcPool* pool, const LlmcQuantizedLinear& a) {
  coded_product<T>(pool, a, LinearEpilogue<T, LlmcQuantizedLinear>{a});
}

template <class T>
void quantized_gated_linear(LlmcPool* pool, const LlmcQuantizedLinear& a) {
  coded_product<T>(pool, a, GatedEpilogue<T, LlmcQuantizedLinear>{a});
}

template <class T>
void quantized_expert_linear(LlmcPool* pool, const LlmcQuantizedLinear& a) {
  const int64_t bytes = a.out / LLMC_PANEL * CodePanels(a, a.in).panel_bytes();
  for_experts<T>(a, [&](int64_t expert, LlmcQuantizedLinear one) {
    one.weight = static_cast<const uint8_t*>(a.weight) + expert * bytes;
    quantized_linear<T>(pool, one);
  });
}

template <class T>
void quantized_lm_head(LlmcPool* pool, const LlmcQuantizedLinear& a) {
  coded_product<T>(pool, a, LinearEpilogue<float, LlmcQuantizedLinear>{a});
}

}  // namespace llmc
