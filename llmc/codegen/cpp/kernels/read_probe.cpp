// Measures memory bandwidth with a loop that only reads: the roofline of every decode step.
#include "thread_pool.h"
#include "vector.h"

uint64_t llmc_read_all(LlmcPool* pool, const void* data, int64_t bytes) {
  constexpr int64_t kBlock = 1 << 17, kUnroll = 8;  // as long as a panel of a weight with in = 2048 bf16
  std::atomic<uint64_t> all{0};
  llmc::parallel_for(pool, bytes / kBlock, [&](int64_t block, void*) {
    const char* from = static_cast<const char*>(data) + block * kBlock;
    llmc::VecBits seen[kUnroll] = {};
    for (int64_t at = 0; at < kBlock; at += kUnroll * static_cast<int64_t>(sizeof(llmc::VecBits))) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < kUnroll; i++) {
        llmc::VecBits value;
        std::memcpy(&value, from + at + i * static_cast<int64_t>(sizeof value), sizeof value);
        seen[i] |= value;
      }
    }
    uint64_t any = 0;
    for (int64_t i = 0; i < kUnroll; i++)
      for (int lane = 0; lane < llmc::kLanes; lane++) any |= seen[i][lane];
    all.fetch_or(any, std::memory_order_relaxed);
  });
  return all.load();
}
