// A vector of floats as wide as the instruction set allows, and the element types that kernels load and store.
//
// Arithmetic is written with the vector extensions of GCC and Clang, which exist for every processor; intrinsics are
// used only where those give slow code. Everything is computed in fp32 and rounded once, to nearest even, at a store.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "bf16.h"

namespace llmc {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecInt __attribute__((vector_size(kLanes * 4)));  // also the result of comparing two Vec
typedef uint32_t VecBits __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecHalves __attribute__((vector_size(kLanes * 2)));

// ---- vectors ---------------------------------------------------------------------------------------------------
inline Vec broadcast(float x) { return x - Vec{}; }

inline Vec fma(Vec a, Vec b, Vec c) {  // a·b + c, rounded once where the processor can
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline VecBits bits_of(Vec x) { return reinterpret_cast<VecBits>(x); }
inline Vec from_bits(VecBits x) { return reinterpret_cast<Vec>(x); }
// a > b ? a : b and a < b ? a : b: b where either is a NaN. One instruction, which compilers do not find by themselves.
inline Vec maximum(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_maskz_max_ps(0xffff, a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline Vec minimum(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_maskz_min_ps(0xffff, a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

inline Vec absolute(Vec x) { return from_bits(bits_of(x) & 0x7fffffffu); }

// Folds the upper half onto the lower until one lane is left: the same tree on every call.
template <class Operator>
inline float reduced(Vec x, const Operator& combine) {
#if defined(__AVX512F__)
  const __m256 half = combine(_mm512_maskz_extractf32x8_ps(0xff, x, 0), _mm512_maskz_extractf32x8_ps(0xff, x, 1));
  const __m128 four = combine(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  const __m128 four = combine(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
#else
  const Vec four = x;
#endif
  return combine(combine(four[0], four[2]), combine(four[1], four[3]));
}

inline float sum_of(Vec x) {
  return reduced(x, [](auto a, auto b) { return a + b; });
}

inline float maximum_of(Vec x) {
  return reduced(x, [](auto a, auto b) { return a > b ? a : b; });
}

// ---- memory: any alignment -------------------------------------------------------------------------------------
inline Vec load(const float* from) {
  Vec x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void store(float* to, Vec x) { std::memcpy(to, &x, sizeof x); }

// Each half as an integer. By an intrinsic: GCC 12 makes two halves and an insertion of the conversion.
inline VecBits widen_halves(VecHalves x) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecBits>(_mm512_maskz_cvtepu16_epi32(0xffff, reinterpret_cast<__m256i>(x)));
#elif defined(__AVX2__)
  return reinterpret_cast<VecBits>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(x)));
#else
  return __builtin_convertvector(x, VecBits);
#endif
}

inline Vec widen(VecHalves x) { return from_bits(widen_halves(x) << 16); }

inline VecHalves narrow(Vec x) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<VecHalves>(_mm512_cvtneps_pbh(x));
#else
  const VecBits bits = bits_of(x);
  const VecBits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const VecBits quiet_nan = (bits >> 16) | 0x40u;
  return __builtin_convertvector(x != x ? quiet_nan : rounded, VecHalves);
#endif
}

inline Vec load(const bf16* from) {
  VecHalves x;
  std::memcpy(&x, from, sizeof x);
  return widen(x);
}

inline void store(bf16* to, Vec x) {
  const VecHalves halves = narrow(x);
  std::memcpy(to, &halves, sizeof halves);
}

// The first `count` lanes, 0 <= count <= kLanes; the others read as zero and are not written. By a mask where there are
// some: a memcpy is a call, which at the end of each panel of a product takes a fifth of its time in cache.
inline Vec load(const float* from, int64_t count) {
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1u), from);
#else
  Vec x = {};
  std::memcpy(&x, from, static_cast<size_t>(count) * 4);
  return x;
#endif
}

inline Vec load(const bf16* from, int64_t count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return widen(reinterpret_cast<VecHalves>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1u), from)));
#else
  VecHalves x = {};
  std::memcpy(&x, from, static_cast<size_t>(count) * 2);
  return widen(x);
#endif
}

inline void store(float* to, Vec x, int64_t count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1u), x);
#else
  std::memcpy(to, &x, static_cast<size_t>(count) * 4);
#endif
}

inline void store(bf16* to, Vec x, int64_t count) {
  const VecHalves halves = narrow(x);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  _mm256_mask_storeu_epi16(to, static_cast<__mmask16>((1u << count) - 1u), reinterpret_cast<__m256i>(halves));
#else
  std::memcpy(to, &halves, static_cast<size_t>(count) * 2);
#endif
}

}  // namespace llmc
