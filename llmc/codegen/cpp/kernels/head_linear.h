// llmc::head_linear: a product of its own for each head of all tokens, y[t, h] = x[t, h] · weight[h]ᵀ.
//
// Heads are small and many: each is one thread's, with some tokens at a time, in one parallel region. Sums are those of
// linear.h, so that a token's result does not depend on its neighbours.
#pragma once
#include "linear.h"
#include "row.h"

namespace llmc {

// Tokens of one head that a thread multiplies at a time.
constexpr int64_t kHeadTokens = 64;

// a: tokens, in and out of one head; experts: heads; x: [tokens, heads · in], y: [tokens, heads · out], weight: panels of
// each head's [out, in], one head after the other.
template <class T>
void head_linear(LlmcPool* pool, const LlmcLinear& a) {
  using Product = PanelProduct<T>;
  constexpr int64_t kBlockSteps = kBlockIn<T> / Product::kStep;
  const int64_t steps = (a.in + Product::kStep - 1) / Product::kStep;
  const int64_t panels = (a.out + LLMC_PANEL - 1) / LLMC_PANEL;
  const int64_t spans = (a.tokens + kHeadTokens - 1) / kHeadTokens;
  const DensePanels<T> weight{static_cast<const T*>(a.weight), steps};
  parallel_for(pool, a.experts * spans, [&](int64_t item, void* scratch) {
    const int64_t head = item / spans, first = item % spans * kHeadTokens;
    const int64_t tokens = std::min(kHeadTokens, a.tokens - first);
    const Tiles tiles(tokens, Product::kTokens);
    auto* packed = static_cast<typename Product::X*>(scratch);
    const auto x = [&](int64_t t) { return row_of<const T>(a.x, t) + head * a.in; };
    for (int64_t k = 0; k < a.in; k += kBlockIn<T>)
      pack_tiles<T>(tiles, x, first, k, std::min(kBlockIn<T>, a.in - k),
                    packed + k / Product::kStep * tokens * Product::kXPerStep);
    auto* sums = reinterpret_cast<float*>(packed + steps * tokens * Product::kXPerStep);
    typename DensePanels<T>::Reader reader(weight, head * panels, (head + 1) * panels, nullptr);
    for (int64_t panel = 0; panel < panels; panel++) {
      for (int64_t step = 0; step < steps; step += kBlockSteps)
        reader.multiply({head * panels + panel, step, std::min(kBlockSteps, steps - step), tiles,
                         packed + step * tokens * Product::kXPerStep, sums});
      const int64_t out = panel * LLMC_PANEL, count = std::min<int64_t>(a.out - out, LLMC_PANEL);
      for (int64_t t = 0; t < tokens; t++) {
        T* y = row_of<T>(a.y, first + t) + head * a.out + out;
        for_vectors(count, [&](int64_t c, auto lanes) { store(y + c, load(sums + t * LLMC_PANEL + c, lanes), lanes); });
      }
    }
  });
}

}  // namespace llmc
