// llmc::segments_of_texts: y[t] = number of separators before t in t's text, count - 1 at most.
#include <algorithm>

#include "kernel.h"

typedef struct {
  int64_t tokens, requests;
  const int32_t* ids;           // [tokens]
  const int32_t* query_starts;  // [requests + 1]
  int64_t separator, count;
  int32_t* y;  // [tokens]
} LlmcSegmentsOfTexts;

namespace {

void segments_of_texts(LlmcPool*, const LlmcSegmentsOfTexts& a) {
  for (int64_t r = 0; r < a.requests; r++) {
    int64_t before = 0;
    for (int64_t t = a.query_starts[r]; t < a.query_starts[r + 1]; t++) {
      a.y[t] = static_cast<int32_t>(std::min(before, a.count - 1));
      before += a.ids[t] == a.separator;
    }
  }
}

}  // namespace

LLMC_KERNEL(LlmcSegmentsOfTexts, segments_of_texts, segments_of_texts)
