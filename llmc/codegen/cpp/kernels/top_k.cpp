// llmc::top_k: each row's largest channels, of equals the lower one first; a row with a NaN has any.
#include "largest.h"
#include "row.h"

// values, index: [tokens, groups, count].
typedef struct {
  int64_t tokens, groups, channels, count;
  LlmcRows x, values, index;
} LlmcTopK;

namespace {

constexpr int64_t kMost = 64;  // MOST_CHANNELS of llmc/ops/top_k.py

template <class T>
void top_k(LlmcPool* pool, const LlmcTopK& a) {
  llmc::for_rows(pool, a.tokens, 8 * a.groups * a.channels, [&](int64_t token) {
    for (int64_t group = 0; group < a.groups; group++) {
      const T* x = llmc::row_of<const T>(a.x, token) + group * a.channels;
      llmc::Largest<kMost> found(a.count);
      for (int64_t c = 0; c < a.channels; c++) found.offer(llmc::to_float(x[c]), c);
      T* values = llmc::row_of<T>(a.values, token) + group * a.count;
      int32_t* index = llmc::row_of<int32_t>(a.index, token) + group * a.count;
      for (int64_t i = 0; i < a.count; i++) {
        index[i] = found.places[i];
        values[i] = llmc::from_float<T>(found.values[i]);
      }
    }
  });
}

}  // namespace

LLMC_KERNELS(LlmcTopK, top_k, top_k)
