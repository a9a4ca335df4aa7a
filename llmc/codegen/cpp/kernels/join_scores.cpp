// llmc::join_scores: the scores by which the heads of several layers choose rows together (llmc/ops/join_scores.py).
#include <algorithm>

#include "compaction.h"
#include "row.h"

typedef struct {
  int64_t heads;  // KV heads of the layer
  int64_t kv_heads, longest;
  const float* scores;  // [heads, longest]
  const float* before;  // [longest] if across_heads, else [kv_heads, longest]; null for the first layer
  const int32_t* compaction;
  int32_t across_heads;
  float* joined;  // [kv_heads, longest]
} LlmcJoinScores;

namespace {

// The largest score of each row goes to the first head of joined, and from there to the others.
void join_heads(const LlmcJoinScores& a, int64_t first, int64_t last) {
  const float* start = a.before == nullptr ? a.scores : a.before;
  std::copy(start + first, start + last, a.joined + first);
  for (int64_t head = 0; head < a.heads; head++) {
    const float* own = a.scores + head * a.longest;
    for (int64_t row = first; row < last; row++) a.joined[row] = std::max(a.joined[row], own[row]);
  }
  for (int64_t head = 1; head < a.kv_heads; head++)
    std::copy(a.joined + first, a.joined + last, a.joined + head * a.longest + first);
}

void add_layers(const LlmcJoinScores& a, int64_t first, int64_t last) {
  for (int64_t head = 0; head < a.kv_heads; head++) {
    const int64_t at = head * a.longest;
    for (int64_t row = at + first; row < at + last; row++)
      a.joined[row] = a.before == nullptr ? a.scores[row] : a.before[row] + a.scores[row];
  }
}

void join_scores(LlmcPool* pool, const LlmcJoinScores& a) {
  constexpr int64_t kRows = 2048;
  const int64_t rows = a.compaction[0];
  llmc::parallel_ranges(pool, a.longest, kRows, [&](int64_t first, int64_t end, void*) {
    const int64_t last = std::clamp(rows, first, end);
    (a.across_heads != 0 ? join_heads : add_layers)(a, first, last);
    for (int64_t head = 0; head < a.kv_heads; head++)
      std::fill(a.joined + head * a.longest + last, a.joined + head * a.longest + end, 0.0f);
  });
}

}  // namespace

LLMC_KERNEL(LlmcJoinScores, join_scores, join_scores)
