// llmc::top_tokens: the likeliest tokens of each row of logits and the logarithms of their probabilities. A row is read
// twice, the second time from cache: for the largest ones, which few vectors have one of, and for the sum of e^logit.
#include <cmath>
#include <type_traits>

#include "largest.h"
#include "logit_row.h"

// ids, logprobs: [rows, count].
typedef struct {
  int64_t rows, vocabulary, count;
  LlmcRows logits;
  const int32_t* token_map;  // [vocabulary] or null
  LlmcRows ids, logprobs;
} LlmcTopTokens;

namespace {

constexpr int64_t kMost = 64;  // MOST_TOKENS of llmc/ops/top_tokens.py

void top_of_row(const LlmcTopTokens& a, int64_t row) {
  const float* const logits = llmc::row_of<const float>(a.logits, row);
  llmc::Largest<kMost> found(a.count);
  llmc::for_vectors(a.vocabulary, [&](int64_t i, auto lanes) {
    if constexpr (std::is_same_v<decltype(lanes), llmc::AllLanes>)
      if (!(llmc::maximum_of(llmc::load(logits + i)) > found.least())) return;
    for (int64_t lane = 0; lane < lanes; lane++) found.offer(logits[i + lane], i + lane);
  });
  const float log_sum = found.values[0] + std::log(llmc::sum_of_weights(logits, a.vocabulary, found.values[0], 1.0f));
  int32_t* const ids = llmc::row_of<int32_t>(a.ids, row);
  float* const logprobs = llmc::row_of<float>(a.logprobs, row);
  for (int64_t i = 0; i < a.count; i++) {
    ids[i] = a.token_map == nullptr ? found.places[i] : a.token_map[found.places[i]];
    logprobs[i] = found.values[i] - log_sum;
  }
}

void top_tokens(LlmcPool* pool, const LlmcTopTokens& a) {
  llmc::for_rows(pool, a.rows, 8 * a.vocabulary, [&](int64_t row) { top_of_row(a, row); });
}

}  // namespace

LLMC_KERNEL(LlmcTopTokens, top_tokens_f32, top_tokens)
