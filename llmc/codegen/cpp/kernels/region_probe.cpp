// What it costs to share work among the threads and wait for all of them: loops with nothing in them.
#include "thread_pool.h"

void llmc_empty_regions(LlmcPool* pool, int64_t repeats) {
  for (int64_t i = 0; i < repeats; i++)
    llmc::parallel_for(pool, 2 * pool->threads(), [](int64_t, void*) { asm volatile("" : : : "memory"); });
}
