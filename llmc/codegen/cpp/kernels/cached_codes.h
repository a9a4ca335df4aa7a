// Whole rows of a KV cache of numbers or codes, read as fp32 and written from activations: llmc/ops/cache_codes.py.
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>

#include "cached_rows.h"
#include "rope.h"

namespace llmc {

template <class K>
inline void decode(const CacheOf<K>& cache, const K* row, float* to) {
  for_vectors(cache.channels, [&](int64_t c, auto lanes) { store(to + c, load(row + c, lanes), lanes); });
}

template <class Format>
inline void decode(const CacheOfCodes<Format>& cache, CodeRow row, float* to) {
  for_vectors(cache.channels, [&](int64_t c, auto lanes) { store(to + c, cache.values(row, c), lanes); });
}

// One head's channels in one row: those of x, rotated.
template <class T, class K>
inline void write_row(const CacheOf<K>& cache, const Rotation& rotation, const T* x, const K* to) {
  rotate(rotation, cache.channels, x, const_cast<K*>(to));
}

// Codes of channels [first, first + width): nearest((x - minimum) / scale), the scale and the minimum being bf16.
template <class Format>
inline void encode_group(const float* x, int64_t width, float scale, float minimum, uint8_t* codes) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  for_vectors(width, [&](int64_t c, auto lanes) {
    const Vec lowest = broadcast(Format::kNibbles ? 0.0f : -Format::kLargest);
    const Vec scaled = (load(x + c, lanes) - minimum) / scale;
    const Vec saturated = maximum(lowest, llmc::minimum(broadcast(Format::kLargest), scaled));
    const Bytes bytes = __builtin_convertvector(Format::encode(saturated), Bytes);
    std::memcpy(codes + c, &bytes, static_cast<size_t>(std::min<int64_t>(kLanes, width - c)));
  });
}

inline void store_bf16(uint8_t* to, float x) {
  const bf16 value = to_bf16(x);
  std::memcpy(to, &value, sizeof value);
}

inline float rounded(float x) { return to_float(to_bf16(x)); }

template <class T, class Format>
inline void write_row(const CacheOfCodes<Format>& cache, const Rotation& rotation, const T* x, CodeRow to) {
  float values[LLMC_CODED_HEAD];
  uint8_t codes[LLMC_CODED_HEAD];
  write_row(CacheOf<float>(cache.channels, 0, 0), rotation, x, values);
  for (int64_t group = 0; group < cache.groups; group++) {
    const float* of_group = values + group * cache.width;
    const bool has_nan = std::any_of(of_group, of_group + cache.width, [](float x) { return x != x; });
    const auto [low, high] = std::minmax_element(of_group, of_group + cache.width);
    const float minimum = Format::kNibbles ? rounded(*low) : 0.0f;
    const float reach = Format::kNibbles ? *high - minimum : std::max(-*low, *high);
    const float exact = rounded(reach / Format::kLargest);
    const float scale = has_nan ? std::numeric_limits<float>::quiet_NaN() : exact > 0.0f ? exact : 1.0f;
    uint8_t* scales = const_cast<uint8_t*>(to.scales) + group * cache.block_size * 2;
    store_bf16(scales, scale);
    if (Format::kNibbles) store_bf16(scales + cache.groups * cache.block_size * 2, minimum);
    encode_group<Format>(of_group, cache.width, scale, minimum, codes + group * cache.width);
  }
  uint8_t* out = const_cast<uint8_t*>(to.codes);
  if (Format::kNibbles) {
    const int64_t half = cache.channels / 2;
    for (int64_t c = 0; c < half; c++) out[c] = static_cast<uint8_t>(codes[c] | codes[half + c] << 4);
  } else {
    std::memcpy(out, codes, static_cast<size_t>(cache.channels));
  }
}

}  // namespace llmc
