// llmc::select_rows: y[i] = x[rows[i]].
#include "row.h"

namespace {

template <class T>
void select_rows(LlmcPool* pool, const LlmcSelectRows& a) {
  llmc::for_rows(pool, a.selected, a.channels, [&](int64_t i) {
    std::memcpy(llmc::row_of<T>(a.y, i), llmc::row_of<const T>(a.x, a.rows[i]), sizeof(T) * a.channels);
  });
}

}  // namespace

void llmc_select_rows_f32(LlmcPool* pool, const LlmcSelectRows* arguments) { select_rows<float>(pool, *arguments); }
void llmc_select_rows_bf16(LlmcPool* pool, const LlmcSelectRows* arguments) {
  select_rows<llmc::bf16>(pool, *arguments);
}
