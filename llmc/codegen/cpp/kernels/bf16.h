// bf16, the upper half of an fp32, and conversions that are free of branches so that loops over them vectorize.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace llmc {

struct bf16 {
  uint16_t bits;
};

inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }

// To nearest, ties to even; a NaN stays one.
inline bf16 to_bf16(float x) {
  const uint32_t bits = to_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(x != x ? (bits >> 16) | 0x40u : rounded)};
}

template <class T>
inline T from_float(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return to_bf16(x);
}

}  // namespace llmc
