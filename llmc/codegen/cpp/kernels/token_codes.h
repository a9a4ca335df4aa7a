// Rounding of activations: one token's channels to codes with one scale (llmc/ops/token_codes.py).
#pragma once
#include "row.h"

namespace llmc {

inline float largest_code(LlmcXCodes format) { return format == LLMC_X_FP8 ? 448.0f : 127.0f; }

// A code is nearest(x · inverse) and stands for code · scale.
struct TokenScale {
  float scale, inverse;
};

// The greatest of some magnitudes, given as bits.
inline float magnitude_of(VecInt bits) {
  int32_t greatest = 0;
  for (int lane = 0; lane < kLanes; lane++) greatest = bits[lane] > greatest ? bits[lane] : greatest;
  float magnitude;
  std::memcpy(&magnitude, &greatest, sizeof magnitude);
  return magnitude;
}

// With `given`, a static scale; NaN either way where x has one. The inverse is rounded as torch rounds a number divided by
// a tensor.
template <class T>
inline TokenScale token_scale(const T* x, int64_t channels, const float* given, LlmcXCodes format) {
  // Bits of magnitudes are in the order of the magnitudes, and those of a NaN come last; maximum() would pass over it.
  VecInt greatest = {};
  for_vectors(channels, [&](int64_t c, auto lanes) {
    const VecInt bits = reinterpret_cast<VecInt>(absolute(load(x + c, lanes)));
    greatest = bits > greatest ? bits : greatest;
  });
  const float magnitude = magnitude_of(greatest), largest = largest_code(format);
  if (given != nullptr) return {magnitude != magnitude ? magnitude : *given, 1.0f / *given};
  return {magnitude / largest, magnitude > 0.0f ? 1.0f / magnitude * largest : 0.0f};
}

// To the nearest multiple of 2^exponent, ties to even, for |x| < 2^(22 + exponent).
inline Vec nearest(Vec x, float magic) { return (x + magic) - magic; }

inline VecInt nearest_integer(Vec x) {
  const Vec magic = broadcast(0x1.8p23f);
  return reinterpret_cast<VecInt>(x + magic) - reinterpret_cast<VecInt>(magic);
}

// The nearest value of e4m3fn, for |x| <= 448: three bits after the leading one, and no finer than 2^-9.
inline Vec nearest_e4m3(Vec x) {
  const VecBits bits = bits_of(x);
  const Vec normal = from_bits((bits + 0x7ffffu + (bits >> 20 & 1u)) & 0xfff00000u);
  const Vec small = nearest(x, 0x1.8p14f);
  return absolute(x) < 0x1p-6f ? small : normal;
}

// e4m3fn in the low byte of each lane; what is above is ignored. Its exponent is 120 less than that of fp32.
inline Vec e4m3_value(VecBits code) {
  const Vec magnitude = from_bits((code & 0x7fu) << 20) * 0x1p120f;
  return from_bits(bits_of(magnitude) | (code & 0x80u) << 24);
}

// The code of the nearest value, for |x| <= 448.
inline VecBits e4m3_code(Vec x) {
  const Vec magnitude = absolute(nearest_e4m3(x));
  const VecBits small = reinterpret_cast<VecBits>(nearest_integer(magnitude * 0x1p9f));
  const VecBits code = magnitude < 0x1p-6f ? small : (bits_of(magnitude) >> 20) - (120u << 3);
  return code | (bits_of(x) >> 24 & 0x80u);
}

inline Vec saturated(Vec x, float largest) {
  return maximum(broadcast(-largest), minimum(broadcast(largest), x));
}

}  // namespace llmc
