// llmc::keep_sums: numbers of the rows that compact_kv keeps, where it moves them (llmc/ops/sum_attention.py).
#include "compaction.h"
#include "row.h"
#include "row_choice.h"

typedef struct {
  int64_t kv_heads, block_size, longest;
  void* sums;           // [blocks, kv_heads, block_size], fp32
  const float* scores;  // [kv_heads, longest]
  const int32_t* compaction;
  int64_t kept_first, kept_last;
  const float* numbers;  // [kv_heads, longest]; null: the scores
} LlmcKeepSums;

namespace {

void keep_head(const LlmcKeepSums& a, const llmc::Compaction& request, int64_t head) {
  const float* scores = a.scores + head * a.longest;
  const float* numbers = a.numbers == nullptr ? scores : a.numbers + head * a.longest;
  const int64_t size = a.block_size, scored = request.kept - a.kept_first - a.kept_last;
  llmc::RowChoice choice(scores, a.kept_first, request.rows - a.kept_last, scored);
  int64_t to = 0;
  for (int64_t row = 0; row < request.rows; row++) {
    if (!choice.keeps(row)) continue;
    const int64_t of_head = request.places[to / size] * a.kv_heads + head;
    static_cast<float*>(a.sums)[of_head * size + to % size] = numbers[row];
    to++;
  }
}

void keep_sums(LlmcPool* pool, const LlmcKeepSums& a) {
  const llmc::Compaction request(a.compaction, a.block_size);
  llmc::parallel_for(pool, a.kv_heads, [&](int64_t head, void*) { keep_head(a, request, head); });
}

}  // namespace

LLMC_KERNEL(LlmcKeepSums, keep_sums, keep_sums)
