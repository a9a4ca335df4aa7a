// Element types and elementary functions for generated loops, free of branches so that compilers vectorize them.
//
// They take scalars, unlike activation.h: a loop mixes element types and strides, and the compiler chooses its width.
// exp and tanh follow Cephes' expf and tanhf (Moshier); erf is formula 7.1.26 of Abramowitz and Stegun, of absolute
// error 1.5e-7. Arithmetic is fp32.
#pragma once
#include <math.h>
#include <stdint.h>

#include "api.h"
#include "bf16.h"
#include "thread_pool.h"

// Keeps one copy of a loop's body, for one thread and for many. A compiler may order sums differently in each copy, and
// then the bits would depend on the number of threads.
#if defined(__clang__)
#define LLMC_ONE_COPY __attribute__((noinline))
#else
#define LLMC_ONE_COPY __attribute__((noipa))
#endif

namespace llmc::loops {

using llmc::bf16;

inline float load(const float& x) { return x; }
inline float load(const bf16& x) { return to_float(x); }
inline int32_t load(const int32_t& x) { return x; }
inline void store(float& to, float x) { to = x; }
inline void store(bf16& to, float x) { to = to_bf16(x); }
inline void store(int32_t& to, int32_t x) { to = x; }
inline float round_bf16(float x) { return load(to_bf16(x)); }

inline float max(float a, float b) { return a > b ? a : b; }
inline float min(float a, float b) { return a < b ? a : b; }
inline int32_t max(int32_t a, int32_t b) { return a > b ? a : b; }
inline int32_t min(int32_t a, int32_t b) { return a < b ? a : b; }

inline int32_t floor_div(int32_t a, int32_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
inline float floor_div(float a, float b) { return floorf(a / b); }
inline int32_t remainder(int32_t a, int32_t b) { return a - b * floor_div(a, b); }
inline float remainder(float a, float b) { return a - b * floorf(a / b); }

// (…(first·x + next)·x + …) + last.
template <class... Rest>
inline float polynomial(float x, float first, Rest... rest) {
  ((first = first * x + rest), ...);
  return first;
}

// Infinities, NaN and denormal results come out right without a branch: 2^n is applied in two factors.
inline float exp(float x) {
  const float below = x > 89.0f ? 89.0f : x;  // this way round a NaN stays
  const float bounded = below < -105.0f ? -105.0f : below;
  const float shifted = bounded * 1.44269504088896341f + 12582912.0f;  // adding 1.5·2^23 rounds to an integer
  const float n = shifted - 12582912.0f;
  const float r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
  float p = polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                       5.0000001201e-1f);
  p = p * r * r + r + 1.0f;
  const int32_t exponent = static_cast<int32_t>(to_bits(shifted) - to_bits(12582912.0f));
  const int32_t low = exponent >> 1, high = exponent - low;
  return p * from_bits(static_cast<uint32_t>(low + 127) << 23) * from_bits(static_cast<uint32_t>(high + 127) << 23);
}

inline float tanh(float x) {
  const float a = fabsf(x), z = x * x;
  const float p = polynomial(z, -5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                             -3.33332819422e-1f);
  const float near_zero = p * z * x + x;
  const float far = 1.0f - 2.0f / (exp(2.0f * a) + 1.0f);
  return a < 0.625f ? near_zero : copysignf(far, x);
}

inline float erf(float x) {
  const float a = fabsf(x), t = 1.0f / (1.0f + 0.3275911f * a);
  const float p = polynomial(t, 1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f);
  return copysignf(1.0f - p * t * exp(-a * a), x);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }
inline float silu(float x) { return x * sigmoid(x); }
inline float gelu(float x) { return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f)); }
inline float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}
inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

}  // namespace llmc::loops
