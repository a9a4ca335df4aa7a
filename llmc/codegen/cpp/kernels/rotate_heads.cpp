// llmc::rotate_heads: each head's channels times an orthonormal Hadamard matrix, block by block.
#include <cmath>

#include "row.h"

enum { LLMC_ROTATED_BLOCK = 1024 };  // channels of a block at most

// Channels [0, first) of a head and those from `first` on have separate blocks, as large as the greatest power of two
// that divides their number. x may be y.
typedef struct {
  int64_t tokens, heads, head_dim, first;
  LlmcRows x;
  LlmcRows y;
} LlmcRotateHeads;

namespace {

// Lane i of x where it was lane i XOR distance, a power of two below kLanes.
inline llmc::Vec exchanged(llmc::Vec x, int distance) {
  llmc::VecInt lanes;
  for (int i = 0; i < llmc::kLanes; i++) lanes[i] = i ^ distance;
#if defined(__AVX512F__)
  return _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(lanes), x);
#elif defined(__AVX2__)
  return _mm256_permutevar8x32_ps(x, reinterpret_cast<__m256i>(lanes));
#else
  llmc::Vec y;
  for (int i = 0; i < llmc::kLanes; i++) y[i] = x[lanes[i]];
  return y;
#endif
}

// (a, b) become (a + b, a - b), where b is `distance` lanes behind a.
inline llmc::Vec butterflies(llmc::Vec x, int distance) {
  llmc::Vec sign;
  for (int i = 0; i < llmc::kLanes; i++) sign[i] = (i & distance) == 0 ? 1.0f : -1.0f;
  return llmc::fma(x, sign, exchanged(x, distance));
}

// One block: `count` channels, a power of two.
template <class T>
void rotate(const T* x, int64_t count, T* y) {
  alignas(64) float values[LLMC_ROTATED_BLOCK + llmc::kLanes];
  llmc::for_vectors(count, [&](int64_t c, auto lanes) {
    llmc::Vec block = llmc::load(x + c, lanes);
    for (int distance = 1; distance < std::min<int64_t>(llmc::kLanes, count); distance *= 2)
      block = butterflies(block, distance);
    llmc::store(values + c, block);
  });
  for (int64_t half = llmc::kLanes; half < count; half *= 2)
    for (int64_t begin = 0; begin < count; begin += 2 * half)
      for (int64_t c = begin; c < begin + half; c += llmc::kLanes) {
        const llmc::Vec a = llmc::load(values + c), b = llmc::load(values + c + half);
        llmc::store(values + c, a + b);
        llmc::store(values + c + half, a - b);
      }
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(count)));
  llmc::for_vectors(count, [&](int64_t c, auto lanes) { llmc::store(y + c, llmc::load(values + c) * factor, lanes); });
}

template <class T>
void rotate_blocks(const T* x, int64_t channels, T* y) {
  const int64_t count = channels & -channels;
  for (int64_t c = 0; c < channels; c += count) rotate(x + c, count, y + c);
}

template <class T>
void rotate_heads(LlmcPool* pool, const LlmcRotateHeads& a) {
  llmc::for_rows(pool, a.tokens, 2 * a.heads * a.head_dim, [&](int64_t token) {
    const T* x = llmc::row_of<const T>(a.x, token);
    T* y = llmc::row_of<T>(a.y, token);
    for (int64_t c = 0; c < a.heads * a.head_dim; c += a.head_dim) {
      rotate_blocks(x + c, a.first, y + c);
      rotate_blocks(x + c + a.first, a.head_dim - a.first, y + c + a.first);
    }
  });
}

}  // namespace

LLMC_KERNELS(LlmcRotateHeads, rotate_heads, rotate_heads)
