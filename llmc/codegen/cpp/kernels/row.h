// How kernels that process rows independently walk channels and share rows among threads.
#pragma once
#include <algorithm>

#include "kernel.h"
#include "thread_pool.h"
#include "vector.h"

namespace llmc {

// Stands where a count of lanes could: a body that takes `auto lanes` is compiled once for whole vectors, once for the
// last, partial one.
struct AllLanes {
  operator int64_t() const { return kLanes; }
};

template <class T>
inline Vec load(const T* from, AllLanes) {
  return load(from);
}

template <class T>
inline void store(T* to, Vec x, AllLanes) {
  store(to, x);
}

// Zero in all lanes from `count` on.
inline Vec keep(Vec x, AllLanes) { return x; }
inline Vec keep(Vec x, int64_t count) {
  float lanes[kLanes];
  store(lanes, x);
  return load(lanes, count);
}

// Calls body(channel, lanes) for each vector of a row.
template <class Body>
inline void for_vectors(int64_t channels, const Body& body) {
  int64_t channel = 0;
  for (; channel + kLanes <= channels; channel += kLanes) body(channel, AllLanes{});
  if (channel < channels) body(channel, channels - channel);
}

// Calls body(row) for each row. `work` is that of one row, in elements of a light loop: a parallel loop costs some
// microseconds, so a small one runs on the caller.
template <class Body>
inline void for_rows(LlmcPool* pool, int64_t rows, int64_t work, const Body& body) {
  constexpr int64_t kSerial = 32768;
  constexpr int64_t kChunk = 8192;
  parallel_each(pool, rows, std::max<int64_t>(1, rows * work < kSerial ? rows : kChunk / work), body);
}

// Element (row, 0), if there are rows at all.
template <class T>
inline T* row_of(const LlmcRows& rows, int64_t row) {
  return rows.data == nullptr ? nullptr : static_cast<T*>(rows.data) + row * rows.stride;
}

}  // namespace llmc
