// The rows of its request's cache that a token sees: all up to its own, except those that a tree hides from it.
#pragma once
#include <algorithm>
#include <cstdint>

namespace llmc {

// A token in row `own`; bit d of `hidden`: it does not see the row d before. The rows that it sees have places: 0, 1, …
// in order, as they would have without the others.
struct VisibleRows {
  static constexpr int64_t kReach = 63;  // the farthest row that can be hidden
  int64_t own;
  uint64_t hidden;

  int64_t count() const { return own + 1 - __builtin_popcountll(hidden); }

  // Up to here a row is its own place.
  int64_t straight() const { return hidden == 0 ? own + 1 : own - (63 - __builtin_clzll(hidden)); }

  // Calls body(row, place, number) for the places [first, last), run by run.
  template <class Body>
  void for_runs(int64_t first, int64_t last, const Body& body) const {
    int64_t place = straight();
    if (first < std::min(last, place)) body(first, first, std::min(last, place) - first);
    for (int64_t row = place; place < last; row++) {
      if (hidden >> (own - row) & 1) continue;
      if (place >= first) body(row, place, int64_t{1});
      place++;
    }
  }
};

}  // namespace llmc
