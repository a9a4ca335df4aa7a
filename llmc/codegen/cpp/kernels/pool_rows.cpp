// llmc::pool_rows: y[i] = the mean of x from the first token of rows[i]'s text to rows[i], or the first token's row.
#include <algorithm>

#include "row.h"

typedef struct {
  int64_t requests, selected, channels;
  LlmcRows x;                   // [tokens, channels]
  const int32_t* query_starts;  // [requests + 1]
  const int32_t* rows;          // [selected]
  int64_t is_mean;              // 0: the first token's row
  LlmcRows y;                   // [selected, channels]
} LlmcPoolRows;

namespace {

// Tokens are added in order: a text's sum has the same bits in every company.
template <class T>
void pool_rows(LlmcPool* pool, const LlmcPoolRows& a) {
  const int64_t tokens = a.requests == 0 ? 0 : a.query_starts[a.requests] / std::max<int64_t>(1, a.selected);
  llmc::for_rows(pool, a.selected, a.channels * std::max<int64_t>(1, tokens), [&](int64_t i) {
    const int64_t last = a.rows[i];
    const int32_t* after = std::upper_bound(a.query_starts, a.query_starts + a.requests + 1, a.rows[i]);
    const int64_t first = after[-1];
    const int64_t end = a.is_mean ? last : first;
    const float factor = 1.0f / static_cast<float>(end - first + 1);
    llmc::for_vectors(a.channels, [&](int64_t c, auto lanes) {
      llmc::Vec sum = {};
      for (int64_t token = first; token <= end; token++)
        sum += llmc::load(llmc::row_of<const T>(a.x, token) + c, lanes);
      llmc::store(llmc::row_of<T>(a.y, i) + c, sum * factor, lanes);
    });
  });
}

}  // namespace

LLMC_KERNELS(LlmcPoolRows, pool_rows, pool_rows)
