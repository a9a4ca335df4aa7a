// How kernels with states walk a step: each request's tokens one by one, in order, so that bits do not depend on how
// its prompt was cut; parts of a state, which are independent, are shared among threads.
#pragma once
#include "row.h"

namespace llmc {

// A request of a step: its tokens, and its state, which counts only if it has one already.
struct Carried {
  int64_t first, end;
  float* state;
  bool has_state;
};

// Calls body(request, part) for each part of each request's state. size: of a state, in floats. work: of a part and a
// token, as of for_rows. Arguments: a kernel's struct with requests, state, query_starts, context_lens, state_slots.
template <class Arguments, class Body>
inline void for_parts(LlmcPool* pool, const Arguments& a, int64_t size, int64_t parts, int64_t work, const Body& body) {
  if (a.requests == 0) return;
  const int64_t tokens = a.query_starts[a.requests];
  const int64_t each = work * ((tokens + a.requests - 1) / a.requests);
  for_rows(pool, a.requests * parts, each, [&](int64_t item) {
    const int64_t r = item / parts;
    const int64_t first = a.query_starts[r], end = a.query_starts[r + 1];
    const bool has_state = a.context_lens[r] > end - first;
    body(Carried{first, end, a.state + a.state_slots[r] * size, has_state}, item % parts);
  });
}

// Calls body(request, channel, lanes) for each vector of a.channels, as parts.
template <class Arguments, class Body>
inline void for_columns(LlmcPool* pool, const Arguments& a, int64_t size, int64_t work, const Body& body) {
  for_parts(pool, a, size, (a.channels + kLanes - 1) / kLanes, work, [&](const Carried& request, int64_t part) {
    const int64_t c = part * kLanes;
    if (c + kLanes <= a.channels)
      body(request, c, AllLanes{});
    else
      body(request, c, a.channels - c);
  });
}

}  // namespace llmc
