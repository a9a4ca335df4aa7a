// Channels times an orthonormal Hadamard matrix, block by block: llmc/ops/rotate_heads.py.
#pragma once
#include <cmath>

#include "row.h"

enum { LLMC_ROTATED_BLOCK = 1024 };  // channels of a block at most

namespace llmc {

// Lane i of x where it was lane i XOR distance, a power of two below kLanes.
inline Vec exchanged(Vec x, int distance) {
  VecInt lanes;
  for (int i = 0; i < kLanes; i++) lanes[i] = i ^ distance;
#if defined(__AVX512F__)
  return _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(lanes), x);
#elif defined(__AVX2__)
  return _mm256_permutevar8x32_ps(x, reinterpret_cast<__m256i>(lanes));
#else
  Vec y;
  for (int i = 0; i < kLanes; i++) y[i] = x[lanes[i]];
  return y;
#endif
}

// (a, b) become (a + b, a - b), where b is `distance` lanes behind a.
inline Vec butterflies(Vec x, int distance) {
  Vec sign;
  for (int i = 0; i < kLanes; i++) sign[i] = (i & distance) == 0 ? 1.0f : -1.0f;
  return fma(x, sign, exchanged(x, distance));
}

// One block: `count` channels, a power of two. x may be y.
template <class T>
void rotate_block(const T* x, int64_t count, T* y) {
  alignas(64) float values[LLMC_ROTATED_BLOCK + kLanes];
  for_vectors(count, [&](int64_t c, auto lanes) {
    Vec block = load(x + c, lanes);
    for (int distance = 1; distance < std::min<int64_t>(kLanes, count); distance *= 2)
      block = butterflies(block, distance);
    store(values + c, block);
  });
  for (int64_t half = kLanes; half < count; half *= 2)
    for (int64_t begin = 0; begin < count; begin += 2 * half)
      for (int64_t c = begin; c < begin + half; c += kLanes) {
        const Vec a = load(values + c), b = load(values + c + half);
        store(values + c, a + b);
        store(values + c + half, a - b);
      }
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(count)));
  for_vectors(count, [&](int64_t c, auto lanes) { store(y + c, load(values + c) * factor, lanes); });
}

// Channels in blocks as large as the greatest power of two that divides their number.
template <class T>
void rotate_blocks(const T* x, int64_t channels, T* y) {
  const int64_t count = channels & -channels;
  for (int64_t c = 0; c < channels; c += count) rotate_block(x + c, count, y + c);
}

}  // namespace llmc
