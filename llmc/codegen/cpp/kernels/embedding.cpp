// Embedding lookups: y[t] = weight[ids[t]], from a row-major table or from the panels of a tied lm_head.
#include "kernel.h"
#include "thread_pool.h"
#include "vector.h"

// y[t] = weight[ids[t]]; the weight row-major, or in the panels of a tied lm_head.   (llmc::embedding)
typedef struct {
  int64_t tokens, channels;
  const int32_t* ids;
  const void* weight;
  LlmcRows y;
} LlmcEmbedding;

namespace llmc {
namespace {

template <class T>
void embedding_rows(LlmcPool* pool, const LlmcEmbedding& a) {
  parallel_each(pool, a.tokens, 64, [&](int64_t t) {
    std::memcpy(static_cast<T*>(a.y.data) + t * a.y.stride, static_cast<const T*>(a.weight) + a.ids[t] * a.channels,
                static_cast<size_t>(a.channels) * sizeof(T));
  });
}

// Row r is lane r % LLMC_PANEL of panel r / LLMC_PANEL; kStep neighbouring k of a lane lie side by side.
template <class T>
void embedding_panels(LlmcPool* pool, const LlmcEmbedding& a) {
  constexpr int64_t kStep = 4 / sizeof(T);
  const int64_t panel_elements = (a.channels + kStep - 1) / kStep * kStep * LLMC_PANEL;
  parallel_each(pool, a.tokens, 8, [&](int64_t t) {
    const int64_t panel = a.ids[t] / LLMC_PANEL, lane = a.ids[t] % LLMC_PANEL;
    const T* from = static_cast<const T*>(a.weight) + panel * panel_elements + lane * kStep;
    T* to = static_cast<T*>(a.y.data) + t * a.y.stride;
    for (int64_t c = 0; c < a.channels; c++) to[c] = from[c / kStep * kStep * LLMC_PANEL + c % kStep];
  });
}

}  // namespace
}  // namespace llmc

LLMC_KERNELS(LlmcEmbedding, embedding, llmc::embedding_rows)
LLMC_KERNEL(LlmcEmbedding, embedding_i32, llmc::embedding_rows<int32_t>)
LLMC_KERNELS(LlmcEmbedding, embedding_panels, llmc::embedding_panels)
