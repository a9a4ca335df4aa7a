// How fast the matrix products bring x into their order: pack_tile on rows that stay in cache.
#include "linear.h"

namespace llmc {
namespace {

template <class T>
int64_t pack_in_cache(LlmcPool* pool, int64_t repeats) {
  using Product = PanelProduct<T>;
  constexpr int64_t kIn = 256, kPerChunk = 100;
  constexpr int kHeight = Product::kTokens;
  parallel_for(pool, repeats, [](int64_t, void*) {
    alignas(64) T x[kIn * kHeight] = {};
    alignas(64) typename Product::X packed[kIn / Product::kStep * Product::kXPerStep * kHeight];
    for (int64_t i = 0; i < kPerChunk; i++) {
      asm volatile("" : : "r"(x), "r"(packed) : "memory");  // the compiler must not see what they hold
      pack_tile<T>(x, kIn, kIn, kHeight, packed);
    }
    asm volatile("" : : "r"(packed) : "memory");
  });
  return repeats * kPerChunk * kIn * kHeight;
}

}  // namespace
}  // namespace llmc

int64_t llmc_pack_in_cache_f32(LlmcPool* pool, int64_t repeats) { return llmc::pack_in_cache<float>(pool, repeats); }

int64_t llmc_pack_in_cache_bf16(LlmcPool* pool, int64_t repeats) {
  return llmc::pack_in_cache<llmc::bf16>(pool, repeats);
}
