// llmc::take_channels, llmc::mark_channels: values of the channels that a token chose, and which those are.
#include <algorithm>

#include "row.h"

typedef struct {
  int64_t tokens, channels, taken;
  LlmcRows x, index, y;
} LlmcTakeChannels;

// y: 1 or 0 for each channel.
typedef struct {
  int64_t tokens, marked, channels;
  LlmcRows index, y;
} LlmcMarkChannels;

namespace {

template <class T>
void take_channels(LlmcPool* pool, const LlmcTakeChannels& a) {
  llmc::for_rows(pool, a.tokens, 4 * a.taken, [&](int64_t token) {
    const T* x = llmc::row_of<const T>(a.x, token);
    const int32_t* index = llmc::row_of<const int32_t>(a.index, token);
    T* y = llmc::row_of<T>(a.y, token);
    for (int64_t i = 0; i < a.taken; i++) y[i] = x[index[i]];
  });
}

void mark_channels(LlmcPool* pool, const LlmcMarkChannels& a) {
  llmc::for_rows(pool, a.tokens, a.channels + 4 * a.marked, [&](int64_t token) {
    const int32_t* index = llmc::row_of<const int32_t>(a.index, token);
    float* y = llmc::row_of<float>(a.y, token);
    std::fill_n(y, a.channels, 0.0f);
    for (int64_t i = 0; i < a.marked; i++) y[index[i]] = 1.0f;
  });
}

}  // namespace

LLMC_KERNELS(LlmcTakeChannels, take_channels, take_channels)
LLMC_KERNEL(LlmcMarkChannels, mark_channels, mark_channels)
