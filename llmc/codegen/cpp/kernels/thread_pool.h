// A small thread pool for many short parallel loops: the caller takes part, chunks are claimed one by one, and a
// waiting thread spins for a few microseconds and then parks.
//
// Because chunks are claimed, a preempted thread delays one chunk and not its share of the loop. Because waiting
// callers park, the system can move a preempted worker to their processor. Nothing allocates after create.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "api.h"

struct LlmcPool {
  using Call = void (*)(const void* body, int64_t index, void* scratch);

  LlmcPool(int32_t threads, int64_t scratch_bytes);
  ~LlmcPool();
  LlmcPool(const LlmcPool&) = delete;
  LlmcPool& operator=(const LlmcPool&) = delete;

  bool start();  // false if the memory or a thread cannot be had
  void run(int64_t count, Call call, const void* body);
  // Thread 0 is the caller. Between loops the caller may put there what all threads then read.
  void* scratch(int32_t thread) const { return scratch_ + thread * scratch_stride_; }
  int32_t threads() const { return threads_; }
  int64_t scratch_bytes() const { return scratch_stride_; }

 private:
  struct Worker {
    LlmcPool* pool;
    int32_t thread;
    pthread_t handle;
  };
  static void* worker_main(void* worker);
  int64_t take_chunks(int32_t thread);
  bool wait_for_chunks();
  void finish(int64_t chunks);

  const int32_t threads_;
  const int64_t scratch_stride_;
  std::byte* scratch_ = nullptr;
  Worker* workers_ = nullptr;
  int32_t started_ = 0;

  Call call_ = nullptr;
  const void* body_ = nullptr;
  int64_t count_ = 0;

  // Own cache lines: all three are written while others spin on them.
  alignas(64) std::atomic<int64_t> unclaimed_{0};
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) std::atomic<int32_t> parked_workers_{0};
  std::atomic<bool> caller_parked_{false};
  std::atomic<bool> stopping_{false};
  pthread_mutex_t mutex_;
  pthread_cond_t work_;
  pthread_cond_t done_;
};

namespace llmc {

// Calls body(index, scratch) for each index in [0, count), claimed in ascending order by all threads of the pool.
// scratch is the calling thread's own. An index should be some microseconds of work; where all are less, is_small leaves
// them to the caller. Loops do not nest.
template <class Body>
inline void parallel_for(LlmcPool* pool, int64_t count, const Body& body, bool is_small = false) {
  if (is_small || count <= 1 || pool->threads() == 1) {
    for (int64_t index = 0; index < count; index++) body(index, pool->scratch(0));
    return;
  }
  const LlmcPool::Call call = [](const void* captured, int64_t index, void* scratch) {
    (*static_cast<const Body*>(captured))(index, scratch);
  };
  pool->run(count, call, &body);
}

// Calls body(begin, end, scratch) for consecutive ranges of at most `grain` indices that cover [0, count).
template <class Body>
inline void parallel_ranges(LlmcPool* pool, int64_t count, int64_t grain, const Body& body) {
  parallel_for(pool, (count + grain - 1) / grain, [&](int64_t range, void* scratch) {
    const int64_t begin = range * grain;
    body(begin, begin + grain < count ? begin + grain : count, scratch);
  });
}

// Calls body(index) for each index in [0, count); a thread claims `grain` neighbouring indices at a time.
template <class Body>
inline void parallel_each(LlmcPool* pool, int64_t count, int64_t grain, const Body& body) {
  parallel_ranges(pool, count, grain, [&](int64_t begin, int64_t end, void*) {
    for (int64_t index = begin; index < end; index++) body(index);
  });
}

}  // namespace llmc
