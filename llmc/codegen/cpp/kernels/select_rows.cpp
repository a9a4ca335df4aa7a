// llmc::select_rows: y[i] = x[rows[i]].
#include "row.h"

typedef struct {
  int64_t selected, channels;
  const int32_t* rows;
  LlmcRows x, y;
} LlmcSelectRows;

namespace {

template <class T>
void select_rows(LlmcPool* pool, const LlmcSelectRows& a) {
  llmc::for_rows(pool, a.selected, a.channels, [&](int64_t i) {
    std::memcpy(llmc::row_of<T>(a.y, i), llmc::row_of<const T>(a.x, a.rows[i]), sizeof(T) * a.channels);
  });
}

}  // namespace

LLMC_KERNELS(LlmcSelectRows, select_rows, select_rows)
