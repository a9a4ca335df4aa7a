// What the processor can multiply: the inner loop of the matrix products on operands that stay in the nearest cache.
#include "panel_product.h"
#include "thread_pool.h"

namespace llmc {
namespace {

template <class T>
int64_t multiply_in_cache(LlmcPool* pool, int64_t repeats) {
  using Product = PanelProduct<T>;
  static constexpr int64_t kSteps = 64;
  static constexpr int kHeight = Product::kTokens;
  constexpr int64_t kPerChunk = 100;
  parallel_for(pool, repeats, [](int64_t, void*) {
    alignas(64) T weight[kSteps * Product::kStep * LLMC_PANEL] = {};
    alignas(64) typename Product::X x[kSteps * Product::kXPerStep * kHeight] = {};
    alignas(64) float sums[kHeight * LLMC_PANEL];
    for (int64_t i = 0; i < kPerChunk; i++) {
      asm volatile("" : : "r"(weight), "r"(x), "r"(sums) : "memory");  // the compiler must not see what they hold
      multiply_panel<T, kHeight>(weight, x, kSteps, sums, i == 0, static_cast<const T*>(weight), 0);
    }
  });
  return 2 * repeats * kPerChunk * kSteps * Product::kStep * LLMC_PANEL * kHeight;
}

}  // namespace
}  // namespace llmc

int64_t llmc_multiply_in_cache_f32(LlmcPool* pool, int64_t repeats) {
  return llmc::multiply_in_cache<float>(pool, repeats);
}

int64_t llmc_multiply_in_cache_bf16(LlmcPool* pool, int64_t repeats) {
  return llmc::multiply_in_cache<llmc::bf16>(pool, repeats);
}
