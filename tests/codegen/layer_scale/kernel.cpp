// llmc::layer_scale: y[t, c] = x[t, c] · weight[c].
#include "row.h"

typedef struct {
  int64_t tokens, channels;
  LlmcRows x;
  const float* weight;
  LlmcRows y;
} LlmcLayerScale;

namespace {

template <class T>
void layer_scale(LlmcPool* pool, const LlmcLayerScale& a) {
  llmc::for_rows(pool, a.tokens, a.channels, [&](int64_t token) {
    const T* x = llmc::row_of<const T>(a.x, token);
    T* y = llmc::row_of<T>(a.y, token);
    llmc::for_vectors(a.channels, [&](int64_t c, auto lanes) {
      llmc::store(y + c, llmc::load(x + c, lanes) * llmc::load(a.weight + c, lanes), lanes);
    });
  });
}

}  // namespace

LLMC_KERNELS(LlmcLayerScale, layer_scale, layer_scale)
