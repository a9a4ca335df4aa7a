// Memory that the ranks of one machine share, with a place for each rank, and a barrier over all ranks.
//
// A collective runs in rounds: each rank writes a part of its values to its own place, waits for all ranks, and reads
// all places. Places are double-buffered: a rank that is one round ahead writes to the other buffer. No rank can be two
// rounds ahead. A waiting rank spins for some microseconds and then sleeps (a futex); it wakes regularly to check for
// lost ranks.
//
// If ranks are on several machines, each machine has such a memory, and `exchange` copies the places of all others to
// it.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "kernel.h"

namespace llmc {

constexpr int64_t kRankLine = 64;
constexpr int64_t kRankPlace = 1 << 20;  // bytes per rank and round

// The first line is nonzero if a rank was lost; the others hold the round that each rank has reached.
inline std::atomic<uint32_t>* rank_word(const LlmcRanks& all, int32_t line) {
  return reinterpret_cast<std::atomic<uint32_t>*>(static_cast<char*>(all.memory) + line * kRankLine);
}

template <class T>
inline T* rank_place(const LlmcRanks& all, int32_t rank) {
  const int64_t head = (all.ranks + 1) * kRankLine;
  return reinterpret_cast<T*>(static_cast<char*>(all.memory) + head + (2 * rank + all.round % 2) * kRankPlace);
}

inline bool is_lost(const LlmcRanks& all) { return rank_word(all, 0)->load(std::memory_order_relaxed) != 0; }

// Until that rank has come to the round; false if a rank was lost.
inline bool wait_for_rank(const LlmcRanks& all, int32_t rank, uint32_t round) {
  constexpr int kSpins = 2000;
  std::atomic<uint32_t>* word = rank_word(all, 1 + rank);
  for (int spin = 0;; spin++) {
    const uint32_t seen = word->load(std::memory_order_acquire);
    if (static_cast<int32_t>(seen - round) >= 0) return true;
    if (spin < kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      continue;
    }
    if (is_lost(all)) return false;
    const timespec limit{0, 50000000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);
  }
}

// Publishes the first `bytes` of this rank's place and waits for all other ranks. Returns false if a rank was lost.
inline bool meet(LlmcRanks& all, int64_t bytes) {
  if (all.exchange != nullptr) return all.exchange(rank_place<char>(all, 0), 2 * kRankPlace, bytes) != 0;
  const uint32_t round = static_cast<uint32_t>(all.round + 1);
  std::atomic<uint32_t>* own = rank_word(all, 1 + all.rank);
  own->store(round, std::memory_order_release);
  syscall(SYS_futex, own, FUTEX_WAKE, 1 << 20, nullptr, nullptr, 0);
  for (int32_t rank = 0; rank < all.ranks; rank++)
    if (rank != all.rank && !wait_for_rank(all, rank, round)) return false;
  return true;
}

// put and take(first row, rows, first column, columns) for pieces of at most kRankPlace bytes.
template <class T, class Put, class Take>
inline void in_rounds(LlmcRanks& all, int64_t rows, int64_t width, const Put& put, const Take& take) {
  constexpr int64_t kMost = kRankPlace / static_cast<int64_t>(sizeof(T));
  const int64_t columns = width < kMost ? width : kMost, most = kMost / columns;
  for (int64_t row = 0; row < rows; row += most)
    for (int64_t column = 0; column < width; column += columns) {
      const int64_t height = rows - row < most ? rows - row : most;
      const int64_t part = width - column < columns ? width - column : columns;
      if (is_lost(all)) return;
      put(row, height, column, part);
      if (!meet(all, height * part * static_cast<int64_t>(sizeof(T)))) return;
      take(row, height, column, part);
      all.round++;
    }
}

}  // namespace llmc
