// Measures peak multiplication throughput: the inner loop of the matrix products on operands in the level-1 cache.
#include "panel_product.h"
#include "quantized_linear.h"
#include "thread_pool.h"

namespace llmc {
namespace {

template <class T>
int64_t multiply_in_cache(LlmcPool* pool, int64_t repeats) {
  using Product = PanelProduct<T>;
  static constexpr int64_t kSteps = 64;
  static constexpr int kHeight = Product::kTokens;
  constexpr int64_t kPerChunk = 100;
  parallel_for(pool, repeats, [&](int64_t, void*) {
    alignas(64) T weight[kSteps * Product::kStep * LLMC_PANEL] = {};
    alignas(64) typename Product::X x[kSteps * Product::kXPerStep * kHeight] = {};
    alignas(64) float sums[kHeight * LLMC_PANEL];
    TileProduct<T> multiply;
    for (int64_t i = 0; i < kPerChunk; i++) {
      asm volatile("" : : "r"(weight), "r"(x), "r"(sums) : "memory");  // the compiler must not see what they hold
      multiply(kHeight, weight, x, kSteps, sums, i == 0, weight, 0);
    }
  });
  return 2 * repeats * kPerChunk * kSteps * Product::kStep * LLMC_PANEL * kHeight;
}

// int8 codes and activations, one scale per row.
int64_t multiply_codes_in_cache(LlmcPool* pool, int64_t repeats) {
  using Product = IntegerProduct<Int8Codes>;
  constexpr int64_t kWords = 64;
  constexpr int64_t kPerChunk = 100;
  parallel_for(pool, repeats, [&](int64_t, void*) {
    alignas(64) uint8_t weight[LLMC_PANEL * 4 * (1 + kWords)] = {};
    alignas(64) Product::X x[kCodeTokens * (1 + kWords * Product::kXPerWord)] = {};
    alignas(64) float sums[kCodeTokens * LLMC_PANEL];
    LlmcQuantizedLinear a = {};
    a.weight = weight;
    a.group = kWords * 4;
    const CodePanels panels(a, a.group);
    const CodeBlock block{panels, panels.header(0, 0), panels.codes(0, 0), 1, kWords, 0, 0, nullptr, 0};
    for (int64_t i = 0; i < kPerChunk; i++) {
      asm volatile("" : : "r"(weight), "r"(x), "r"(sums) : "memory");
      multiply_codes<Product, kCodeTokens>(block, x, sums, i == 0, FetchCodes{weight, 0});
    }
  });
  return 2 * repeats * kPerChunk * kWords * 4 * LLMC_PANEL * kCodeTokens;
}

}  // namespace
}  // namespace llmc

int64_t llmc_multiply_in_cache_f32(LlmcPool* pool, int64_t repeats) {
  return llmc::multiply_in_cache<float>(pool, repeats);
}

int64_t llmc_multiply_in_cache_bf16(LlmcPool* pool, int64_t repeats) {
  return llmc::multiply_in_cache<llmc::bf16>(pool, repeats);
}

int64_t llmc_multiply_in_cache_int8(LlmcPool* pool, int64_t repeats) {
  return llmc::multiply_codes_in_cache(pool, repeats);
}
