// llmc::select_channels: each token's channels in another order.
#include "row.h"

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

void llmc_select_channels_f32(LlmcPool* pool, const LlmcSelectChannels* arguments) {
  select_channels<float>(pool, *arguments);
}

void llmc_select_channels_bf16(LlmcPool* pool, const LlmcSelectChannels* arguments) {
  select_channels<llmc::bf16>(pool, *arguments);
}
