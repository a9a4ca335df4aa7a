// llmc::all_gather: y is the concatenation of all ranks' channels of x, without padding.
#include "ranks.h"
#include "row.h"

// ends: where each rank's channels end in y, which has `channels` for each group of a row; each rank's x has `width`.
typedef struct {
  int64_t tokens, groups, width, channels;
  const int32_t* ends;
  LlmcRows x, y;
  void* ranks;  // LlmcRanks
} LlmcAllGather;

namespace {

// Groups of a token are counted as rows.
template <class T>
T* run_of(const LlmcAllGather& a, const LlmcRows& rows, int64_t row, int64_t width) {
  return llmc::row_of<T>(rows, row / a.groups) + row % a.groups * width;
}

template <class T>
void all_gather(LlmcPool* pool, const LlmcAllGather& a) {
  LlmcRanks& all = *static_cast<LlmcRanks*>(a.ranks);
  auto put = [&](int64_t first, int64_t rows, int64_t column, int64_t columns) {
    T* place = llmc::rank_place<T>(all, all.rank);
    for (int64_t row = 0; row < rows; row++)
      std::memcpy(place + row * columns, run_of<const T>(a, a.x, first + row, a.width) + column, sizeof(T) * columns);
  };
  auto take = [&](int64_t first, int64_t rows, int64_t column, int64_t columns) {
    llmc::for_rows(pool, rows, columns * all.ranks, [&](int64_t row) {
      T* y = run_of<T>(a, a.y, first + row, a.channels) + column;
      for (int32_t rank = 0; rank < all.ranks; rank++) {
        const int64_t start = rank == 0 ? 0 : a.ends[rank - 1], left = a.ends[rank] - start - column;
        const int64_t own = left < columns ? left : columns;
        if (own > 0)
          std::memcpy(y + start, llmc::rank_place<const T>(all, rank) + row * columns, sizeof(T) * own);
      }
    });
  };
  llmc::in_rounds<T>(all, a.tokens * a.groups, a.width, put, take);
}

}  // namespace

LLMC_KERNELS(LlmcAllGather, all_gather, all_gather)
