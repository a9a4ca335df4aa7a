// llmc::choose_across: one token for each row of logits, when each rank holds a part of the row. The ranks exchange
// what they found in their own parts, a few bytes per row, instead of the logits.
//
// The ranks first exchange their most likely tokens. For rows that draw they then exchange the tokens drawn with the
// largest logit of all ranks. So numbers have the same bits as in whole rows, which llmc_choose_rows reads, and the
// tokens are the same.
#include <cmath>

#include "logit_row.h"
#include "ranks.h"

// ends: where each rank's channels end in the whole row; each rank's x has `width`. choices: temperature, seeds,
// counters, tokens and scores of the rows, as for llmc_choose_rows, without filters.
typedef struct {
  int64_t tokens, width;
  const int32_t* ends;
  LlmcRows x;
  const LlmcChooseRows* choices;
  void* ranks;  // LlmcRanks
} LlmcChooseAcross;

namespace {

using llmc::LogitRow;
using llmc::kInfinity;

struct Best {
  float score;  // NaN where a logit is
  int32_t token;
};

struct Drawn {
  double sum;
  int64_t token;
};

struct Part {
  int64_t first, width;
};

Part part_of(const LlmcChooseAcross& a, int32_t rank) {
  const int64_t first = rank == 0 ? 0 : a.ends[rank - 1];
  return {first, a.ends[rank] - first};
}

LogitRow row_of(const LlmcChooseAcross& a, const Part& part, int64_t index, void* scratch) {
  auto* blocks = static_cast<llmc::LogitBlock*>(scratch);
  const float* logits = llmc::row_of<const float>(a.x, index);
  LogitRow row = {logits, part.width, llmc::per_temperature_of(a.choices->temperature[index]), blocks, -kInfinity, 0};
  for (int64_t block = 0; block < LogitRow::blocks_of(part.width); block++) {
    blocks[block].largest = llmc::largest_of(logits + row.begin(block), row.end(block) - row.begin(block));
    row.largest = std::max(row.largest, blocks[block].largest);
  }
  return row;
}

Best best_of(const LlmcChooseAcross& a, const Part& part, int64_t index, void* scratch) {
  const LogitRow row = row_of(a, part, index, scratch);
  if (row.largest == -kInfinity) return {-kInfinity, 0};
  const int32_t token = llmc::first_largest(row);
  return {row.logits[token], static_cast<int32_t>(part.first + token)};
}

Drawn drawn_of(const LlmcChooseAcross& a, const Part& part, int64_t index, void* scratch) {
  LogitRow row = row_of(a, part, index, scratch);
  row.largest = a.choices->scores[index];
  const llmc::NoiseKey key = {static_cast<uint32_t>(a.choices->seeds[index]),
                              static_cast<uint32_t>(a.choices->counters[index])};
  llmc::LargestSum found(row.logits, row.largest, row.per_temperature, key, part.first);
  llmc::offer_all(row, part.first, &found);
  return {found.sum(), part.first + found.token()};
}

bool draws(const LlmcChooseRows& choices, int64_t index) {
  return choices.temperature[index] > 0.0f && std::isfinite(choices.scores[index]);
}

// Exchanges results between ranks. Each rank computes of(row, scratch) for its part; take(row, found) then receives
// found(rank), the result of each rank.
template <class T, class Of, class Take>
void across(LlmcPool* pool, const LlmcChooseAcross& a, const Of& of, const Take& take) {
  LlmcRanks& all = *static_cast<LlmcRanks*>(a.ranks);
  auto put = [&](int64_t first, int64_t rows, int64_t, int64_t) {
    T* place = llmc::rank_place<T>(all, all.rank);
    llmc::parallel_for(pool, rows, [&](int64_t row, void* scratch) { place[row] = of(first + row, scratch); });
  };
  auto join = [&](int64_t first, int64_t rows, int64_t, int64_t) {
    for (int64_t row = 0; row < rows; row++)
      take(first + row, [&](int32_t rank) -> const T& { return llmc::rank_place<const T>(all, rank)[row]; });
  };
  llmc::in_rounds<T>(all, a.tokens, 1, put, join);
}

void choose_across(LlmcPool* pool, const LlmcChooseAcross& a) {
  const LlmcRanks& all = *static_cast<LlmcRanks*>(a.ranks);
  const LlmcChooseRows& choices = *a.choices;
  const Part part = part_of(a, all.rank);
  // The lowest token with the largest logit, and the first that is NaN: ranks' tokens ascend.
  across<Best>(
      pool, a, [&](int64_t row, void* scratch) { return best_of(a, part, row, scratch); },
      [&](int64_t row, const auto& found) {
        Best best = {-kInfinity, 0};
        for (int32_t rank = 0; rank < all.ranks && !std::isnan(best.score); rank++)
          if (const Best& other = found(rank); std::isnan(other.score) || other.score > best.score) best = other;
        choices.scores[row] = best.score;
        choices.tokens[row] = best.token;
      });
  bool any = false;
  for (int64_t row = 0; row < a.tokens; row++) any = any || draws(choices, row);
  if (!any) return;
  across<Drawn>(
      pool, a,
      [&](int64_t row, void* scratch) {
        return draws(choices, row) ? drawn_of(a, part, row, scratch) : Drawn{-double{kInfinity}, 0};
      },
      [&](int64_t row, const auto& found) {
        if (!draws(choices, row)) return;
        Drawn drawn = {-double{kInfinity}, 0};
        for (int32_t rank = 0; rank < all.ranks; rank++)
          if (found(rank).sum > drawn.sum) drawn = found(rank);
        choices.tokens[row] = static_cast<int32_t>(drawn.token);
      });
}

}  // namespace

LLMC_KERNEL(LlmcChooseAcross, choose_across, choose_across)
