// Which inner loop multiplies weights of a format and activations: for quantized_linear_*.cpp.
#pragma once
#include "quantized_runs.h"

namespace llmc {

#if defined(__AVX512BF16__)
template <class T, class Codes>
using OperandsOf = std::conditional_t<std::is_same_v<T, bf16>, PairOperands<Codes>, FloatOperands<Codes>>;
#else
template <class T, class Codes>
using OperandsOf = FloatOperands<Codes>;
#endif

// The fastest exact product of integers.
template <class T, class Codes, class Epilogue, class AllRuns>
void integer_product(LlmcPool* pool, const LlmcQuantizedLinear& a, const AllRuns& all) {
  int64_t most = INT64_MAX;
#if defined(__AMX_INT8__)
  if (fits_tiles<Codes>(CodePanels(a, a.in))) {
    most = kLeastTiled;
    all.each(most, INT64_MAX, [&](const Runs& runs) {
      quantized_product<TiledProduct<Codes>, T, Epilogue>(pool, a, runs);
    });
  }
#endif
  all.each(1, most, [&](const Runs& runs) { quantized_product<IntegerProduct<Codes>, T, Epilogue>(pool, a, runs); });
}

// Whether int8 tokens have a scale per run, or weights have minima.
inline bool is_by_runs(const LlmcQuantizedLinear& a) {
  return a.x_format == LLMC_X_INT8 && (a.x_group != 0 || kRecords[a.format].has_minimum);
}

// Epilogue: of `a`, what is done with the sums. AllRuns: of its tokens, with which weights they are multiplied.
template <class T, class Epilogue, class AllRuns>
void coded_product(LlmcPool* pool, const LlmcQuantizedLinear& a) {
  const AllRuns all{a};
  const auto multiply = [&](auto product) {
    all.each(1, INT64_MAX, [&](const Runs& runs) { quantized_product<decltype(product), T, Epilogue>(pool, a, runs); });
  };
  const auto format = static_cast<LlmcCodes>(a.format);
  const bool has_nibbles = CodePanels(a, a.in).bits == 4;
  if (is_by_runs(a) && kRecords[a.format].group != 0)
    return has_nibbles ? multiply(UnitProduct<Int4Codes>{}) : multiply(UnitProduct<Int8Codes>{});
  if (is_by_runs(a))
    return has_nibbles ? multiply(IntegerProduct<Int4Codes, true>{}) : multiply(IntegerProduct<Int8Codes, true>{});
  if (a.x_format == LLMC_X_INT8)
    return has_nibbles ? integer_product<T, Int4Codes, Epilogue>(pool, a, all)
                       : integer_product<T, Int8Codes, Epilogue>(pool, a, all);
  switch (format) {
    case LLMC_Q4_1:
    case LLMC_Q4_K:
      return multiply(FloatProduct<OperandsOf<T, Int4Codes>, true>{});
    case LLMC_Q5_1:
    case LLMC_Q5_K:
    case LLMC_Q2_K:
      return multiply(FloatProduct<OperandsOf<T, Int8Codes>, true>{});
    case LLMC_Q3_K:
    case LLMC_Q6_K:
    case LLMC_IQ4_NL:
    case LLMC_IQ4_XS:
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
constexpr auto quantized_linear = coded_product<T, LinearEpilogue<T, LlmcQuantizedLinear>, WholeRuns>;

template <class T>
constexpr auto quantized_gated_linear = coded_product<T, GatedEpilogue<T, LlmcQuantizedLinear>, WholeRuns>;

template <class T>
constexpr auto quantized_expert_linear = coded_product<T, LinearEpilogue<T, LlmcQuantizedLinear>, ExpertRuns<T>>;

template <class T>
constexpr auto quantized_lm_head = coded_product<T, LinearEpilogue<float, LlmcQuantizedLinear>, WholeRuns>;

}  // namespace llmc
