// llmc::all_reduce: y = the sum of all ranks' x, in fp32 and in the order of ranks, so with the same bits on each.
#include "ranks.h"
#include "row.h"

typedef struct {
  int64_t tokens, channels;
  LlmcRows x, y;
  void* ranks;  // LlmcRanks
} LlmcAllReduce;

namespace {

template <class T>
void all_reduce(LlmcPool* pool, const LlmcAllReduce& a) {
  LlmcRanks& all = *static_cast<LlmcRanks*>(a.ranks);
  auto put = [&](int64_t first, int64_t rows, int64_t column, int64_t columns) {
    T* place = llmc::rank_place<T>(all, all.rank);
    for (int64_t row = 0; row < rows; row++)
      std::memcpy(place + row * columns, llmc::row_of<const T>(a.x, first + row) + column, sizeof(T) * columns);
  };
  auto take = [&](int64_t first, int64_t rows, int64_t column, int64_t columns) {
    llmc::for_rows(pool, rows, columns * all.ranks, [&](int64_t row) {
      T* y = llmc::row_of<T>(a.y, first + row) + column;
      llmc::for_vectors(columns, [&](int64_t channel, auto lanes) {
        const int64_t at = row * columns + channel;
        llmc::Vec sum = llmc::load(llmc::rank_place<const T>(all, 0) + at, lanes);
        for (int32_t rank = 1; rank < all.ranks; rank++)
          sum = sum + llmc::load(llmc::rank_place<const T>(all, rank) + at, lanes);
        llmc::store(y + channel, sum, lanes);
      });
    });
  };
  llmc::in_rounds<T>(all, a.tokens, a.channels, put, take);
}

}  // namespace

LLMC_EXPORT int64_t llmc_ranks_bytes(int32_t ranks) {
  return (ranks + 1) * llmc::kRankLine + 2 * ranks * llmc::kRankPlace;
}

LLMC_KERNELS(LlmcAllReduce, all_reduce, all_reduce)
