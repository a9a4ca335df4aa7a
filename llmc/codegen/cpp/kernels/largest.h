// The largest values of a row, in descending order.
#pragma once
#include <cstdint>
#include <limits>

namespace llmc {

// The largest values that were offered, in descending order. Equal values stay in the order in which they were offered.
template <int64_t kMost>
struct Largest {
  float values[kMost];
  int32_t places[kMost];
  int64_t count;

  explicit Largest(int64_t wanted) : count(wanted) {
    for (int64_t i = 0; i < count; i++)
      values[i] = -std::numeric_limits<float>::infinity(), places[i] = static_cast<int32_t>(i);
  }
  float least() const { return values[count - 1]; }
  void offer(float value, int64_t place) {
    if (!(value > least())) return;
    int64_t at = count - 1;
    for (; at > 0 && value > values[at - 1]; at--) values[at] = values[at - 1], places[at] = places[at - 1];
    values[at] = value;
    places[at] = static_cast<int32_t>(place);
  }
};

}  // namespace llmc
