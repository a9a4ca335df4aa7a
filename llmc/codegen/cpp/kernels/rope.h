// Rotation of one head's channels by its token's angles: the inside of llmc::rope and llmc::rope_kv_write.
//
// Pair (a, b) becomes (a·cos - b·sin, b·cos + a·sin). Source: Su et al. 2021, "RoFormer".
#pragma once
#include "row.h"

namespace llmc {

struct Rotation {
  const float* cos;  // [half]
  const float* sin;
  int64_t half;
  bool interleaved;  // pairs (0, 1), (2, 3), …; otherwise (i, i + half)
};

inline Vec rounded_to(Vec x, float) { return x; }
inline Vec rounded_to(Vec x, bf16) { return widen(narrow(x)); }

// Rounds to T, the activations' type, before the result becomes a U. y may be x.
template <class T, class U>
inline void rotate(const Rotation& rotation, int64_t channels, const T* x, U* y) {
  const int64_t half = rotation.half;
  if (rotation.interleaved) {
    for (int64_t i = 0; i < half; i++) {
      const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
      const float cos = rotation.cos[i], sin = rotation.sin[i];
      y[2 * i] = from_float<U>(to_float(from_float<T>(a * cos - b * sin)));
      y[2 * i + 1] = from_float<U>(to_float(from_float<T>(b * cos + a * sin)));
    }
  } else {
    for_vectors(half, [&](int64_t i, auto lanes) {
      const Vec a = load(x + i, lanes), b = load(x + half + i, lanes);
      const Vec cos = load(rotation.cos + i, lanes), sin = load(rotation.sin + i, lanes);
      store(y + i, rounded_to(a * cos - b * sin, T{}), lanes);
      store(y + half + i, rounded_to(b * cos + a * sin, T{}), lanes);
    });
  }
  for_vectors(channels - 2 * half, [&](int64_t i, auto lanes) {
    store(y + 2 * half + i, load(x + 2 * half + i, lanes), lanes);
  });
}

}  // namespace llmc
