// What the ranks of one machine share: a piece of memory in which each has a place, and a way to wait for all others.
//
// A collective goes in rounds: each rank puts a part of its values into its own place, waits until all have, and reads
// all places. Places are double, so that a rank that is a round ahead writes into the other one; none can be two ahead.
// Who waits spins for some microseconds and then sleeps (a futex), and wakes by itself to see whether a rank was lost.
//
// Ranks of several machines have such a memory each, and `exchange` brings the places of all others into it.
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
constexpr int64_t kRankPlace = 1 << 20;  // bytes a rank and round

// The first line says that a rank was lost, the others how far each rank is.
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

// What this rank has put into its place (bytes) may be read, and so may all others'. False if a rank was lost.
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
