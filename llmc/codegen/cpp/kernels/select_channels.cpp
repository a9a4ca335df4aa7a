// llmc::select_channels: each token's channels in another order.
#include "row.h"

typedef struct {
  int64_t tokens, channels;
  const int32_t* order;
  LlmcRows x, y;
} LlmcSelectChannels;

namespace {

template <class T>
void select_channels(LlmcPool* pool, const LlmcSelectChannels& a) {
  llmc::for_rows(pool, a.tokens, 4 * a.channels, [&](int64_t token) {
    const T* x = llmc::row_of<const T>(a.x, token);
    T* y = llmc::row_of<T>(a.y, token);
    for (int64_t c = 0; c < a.channels; c++) y[c] = x[a.order[c]];
  });
}

}  // namespace

LLMC_KERNELS(LlmcSelectChannels, select_channels, select_channels)
