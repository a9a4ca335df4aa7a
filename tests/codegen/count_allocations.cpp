// Preloaded in front of the C library: counts what all threads allocate while a step runs.
#include <atomic>
#include <cstddef>

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

static std::atomic<bool> counting{false};
static std::atomic<long> count{0};

static void note() {
  if (counting) count++;
}
void* malloc(size_t size) { return note(), __libc_malloc(size); }
void* calloc(size_t items, size_t size) { return note(), __libc_calloc(items, size); }
void* realloc(void* old, size_t size) { return note(), __libc_realloc(old, size); }
void* aligned_alloc(size_t alignment, size_t size) { return note(), __libc_memalign(alignment, size); }

long count_step(void (*step)(void*, const void*), void* engine, const void* arguments) {
  count = 0;
  counting = true;
  step(engine, arguments);
  counting = false;
  return count;
}
static void allocate_once(void* size, const void*) {
  void* volatile block = malloc(*static_cast<size_t*>(size));
  (void)block;
}
// Proof that counting works.
long count_one_allocation() {
  size_t size = 64;
  return count_step(allocate_once, &size, nullptr);
}
}
