// llmc::rank_rows: y[t] = ids[t] - first if that is a row of this rank's part of a table, and `rows` if not.
#include "kernel.h"

typedef struct {
  int64_t tokens, rows;
  const int32_t* ids;
  const int32_t* first;
  int32_t* y;
} LlmcRankRows;

namespace {

void rank_rows(LlmcPool*, const LlmcRankRows& a) {
  for (int64_t t = 0; t < a.tokens; t++) {
    const int64_t own = static_cast<int64_t>(a.ids[t]) - a.first[0];
    a.y[t] = static_cast<int32_t>(own >= 0 && own < a.rows ? own : a.rows);
  }
}

}  // namespace

LLMC_KERNEL(LlmcRankRows, rank_rows, rank_rows)
