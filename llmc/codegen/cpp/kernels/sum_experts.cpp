// llmc::sum_experts: what a token's experts yield, times what each counts, summed in the order of its slots.
#include "row.h"

typedef struct {
  int64_t tokens, slots, channels;
  LlmcRows x, weights, y;
} LlmcSumExperts;

namespace {

template <class T, class W>
void sum_experts(LlmcPool* pool, const LlmcSumExperts& a) {
  llmc::for_rows(pool, a.tokens, a.slots * a.channels, [&](int64_t token) {
    const T* x = llmc::row_of<const T>(a.x, token);
    const W* weights = llmc::row_of<const W>(a.weights, token);
    T* y = llmc::row_of<T>(a.y, token);
    llmc::for_vectors(a.channels, [&](int64_t c, auto lanes) {
      llmc::Vec sum = llmc::load(x + c, lanes) * llmc::to_float(weights[0]);
      for (int64_t slot = 1; slot < a.slots; slot++)
        sum = sum + llmc::load(x + slot * a.channels + c, lanes) * llmc::to_float(weights[slot]);
      llmc::store(y + c, sum, lanes);
    });
  });
}

}  // namespace

LLMC_KERNEL(LlmcSumExperts, sum_experts_f32_f32, (sum_experts<float, float>))
LLMC_KERNEL(LlmcSumExperts, sum_experts_f32_bf16, (sum_experts<float, llmc::bf16>))
LLMC_KERNEL(LlmcSumExperts, sum_experts_bf16_f32, (sum_experts<llmc::bf16, float>))
LLMC_KERNEL(LlmcSumExperts, sum_experts_bf16_bf16, (sum_experts<llmc::bf16, llmc::bf16>))
