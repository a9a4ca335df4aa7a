// exp, tanh, erf and the activations of LlmcActivation for vectors of floats, each within about 2 ulp.
#pragma once
#include "api.h"
#include "vector.h"

namespace llmc {

// (…(first·x + next)·x + …) + last.
template <class... Rest>
inline Vec polynomial(Vec x, float first, Rest... rest) {
  Vec sum = broadcast(first);
  ((sum = fma(sum, x, broadcast(rest))), ...);
  return sum;
}

// Source: Cody and Waite's reduction x = n·ln2 + r, |r| <= ln2/2, with Cephes' polynomial for e^r. Denormal results,
// infinities and NaN come out right: 2^n is applied in two factors.
inline Vec exp(Vec x) {
  x = minimum(broadcast(89.0f), x);  // this way round a NaN stays
  x = maximum(broadcast(-105.0f), x);
  const Vec magic = broadcast(12582912.0f);  // 1.5·2^23: adding it rounds to an integer, kept in the low bits
  const Vec shifted = fma(x, broadcast(1.44269504088896341f), magic);
  const Vec n = shifted - magic;
  Vec r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                     5.0000001201e-1f);
  p = fma(p, r * r, r) + 1.0f;
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(0xffff, p, n);
#else
  const VecInt exponent = reinterpret_cast<VecInt>(shifted) - reinterpret_cast<VecInt>(magic);
  const VecInt low = exponent >> 1;
  const VecInt high = exponent - low;
  return p * reinterpret_cast<Vec>((low + 127) << 23) * reinterpret_cast<Vec>((high + 127) << 23);
#endif
}

// Source: Cephes tanhf.
inline Vec tanh(Vec x) {
  const Vec a = absolute(x);
  const Vec s = x * x;
  const Vec p = polynomial(s, -5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                           -3.33332819422e-1f);
  const Vec small = fma(p * s, x, x);
  const Vec large = 1.0f - 2.0f / (exp(a + a) + 1.0f);
  const Vec signed_large = from_bits(bits_of(large) | (bits_of(x) & 0x80000000u));
  return a < 0.625f ? small : signed_large;
}

// Source: N. Juffa's minimax approximations of erff.
inline Vec erf(Vec x) {
  const Vec t = absolute(x);
  const Vec s = x * x;
  Vec r = fma(broadcast(-1.72853470e-5f), t, broadcast(3.83197126e-4f));
  const Vec u = fma(broadcast(-3.88396438e-3f), t, broadcast(2.42546219e-2f));
  r = fma(r, s, u);
  r = fma(r, t, broadcast(-1.06777877e-1f));
  r = fma(r, t, broadcast(-6.34846687e-1f));
  r = fma(r, t, broadcast(-1.28717512e-1f));
  r = fma(r, t, -t);
  // Past 4 erf is 1 in fp32, and the polynomial would overflow.
  const Vec large = t > 4.0f ? broadcast(1.0f) : 1.0f - exp(r);
  const Vec signed_large = from_bits(bits_of(large) | (bits_of(x) & 0x80000000u));
  const Vec p = polynomial(s, -5.96761703e-4f, 4.99119423e-3f, -2.67681349e-2f, 1.12819925e-1f, -3.76125336e-1f,
                           1.28379166e-1f);
  const Vec small = fma(p, x, x);
  const Vec result = t > 0.927734375f ? signed_large : small;
  return x != x ? x : result;
}

inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }
inline Vec silu(Vec x) { return x / (1.0f + exp(-x)); }
inline Vec gelu(Vec x) { return 0.5f * x * (1.0f + erf(x * 0.707106781186547524f)); }
inline Vec gelu_tanh(Vec x) {
  return 0.5f * x * (1.0f + tanh(0.797884560802865356f * fma(x * x * x, broadcast(0.044715f), x)));
}
inline Vec relu(Vec x) { return x < 0.0f ? Vec{} : x; }
inline Vec quick_gelu(Vec x) { return x / (1.0f + exp(-1.702f * x)); }

inline Vec activate(LlmcActivation activation, Vec x) {
  switch (activation) {
    case LLMC_IDENTITY:
      return x;
    case LLMC_SILU:
      return silu(x);
    case LLMC_GELU:
      return gelu(x);
    case LLMC_GELU_TANH:
      return gelu_tanh(x);
    case LLMC_RELU:
      return relu(x);
    case LLMC_RELU2:
      return relu(x) * relu(x);
    case LLMC_QUICK_GELU:
      return quick_gelu(x);
    case LLMC_SIGMOID:
      return sigmoid(x);
    case LLMC_TANH:
      return tanh(x);
  }
  return x;
}

}  // namespace llmc
