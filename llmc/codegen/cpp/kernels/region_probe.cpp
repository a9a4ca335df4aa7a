// Measures the cost of a parallel region: empty loops that start all threads and wait for them.
#include "thread_pool.h"

void llmc_empty_regions(LlmcPool* pool, int64_t repeats) {
  for (int64_t i = 0; i < repeats; i++)
    llmc::parallel_for(pool, 2 * pool->threads(), [](int64_t, void*) { asm volatile("" : : : "memory"); });
}
