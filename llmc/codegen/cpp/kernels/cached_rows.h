// Rows of a paged cache: where one head's channels at one position lie, and what numbers they are.
#pragma once
#include <algorithm>
#include <type_traits>

#include "row.h"
#include "token_codes.h"

// Caches of codes are bytes as llmc/ops/cache_codes.py lays them out; a head has LLMC_CODED_HEAD channels at most.
enum { LLMC_CODED_HEAD = 1024 };

namespace llmc {

// A cache of numbers: K is float or bf16. A row is a pointer to its channels.
template <class K>
struct CacheOf {
  using Row = const K*;
  int64_t channels, block_size;

  CacheOf(int64_t channels, int64_t block_size, int64_t) : channels(channels), block_size(block_size) {}
  int64_t head_bytes() const { return block_size * channels * static_cast<int64_t>(sizeof(K)); }  // of a block
  int64_t row_bytes() const { return channels * static_cast<int64_t>(sizeof(K)); }
  Row row(const void* block, int64_t position) const { return static_cast<const K*>(block) + position * channels; }
  Row next(Row row) const { return row + channels; }
  static Row moved(Row row, int64_t bytes) { return row + bytes / static_cast<int64_t>(sizeof(K)); }
  static const void* address(Row row) { return row; }
};

// ---- codes: llmc/ops/cache_codes.py ----------------------------------------------------------------------------
// A format: value(code) for codes in the low bytes of lanes; encode(x) for |x| <= kLargest, in the low bits of lanes.
struct Int8Cache {
  static constexpr bool kNibbles = false;
  static constexpr float kLargest = 127.0f;
  static Vec value(VecBits code) { return __builtin_convertvector(reinterpret_cast<VecInt>(code << 24) >> 24, Vec); }
  static VecBits encode(Vec x) { return reinterpret_cast<VecBits>(nearest_integer(x)); }
};

struct Fp8Cache {
  static constexpr bool kNibbles = false;
  static constexpr float kLargest = 448.0f;
  static Vec value(VecBits code) { return e4m3_value(code); }
  static VecBits encode(Vec x) { return e4m3_code(x); }
};

// Two channels a byte, half a head apart; a minimum is added.
struct Int4Cache {
  static constexpr bool kNibbles = true;
  static constexpr float kLargest = 15.0f;
  static Vec value(VecBits code) { return __builtin_convertvector(reinterpret_cast<VecInt>(code), Vec); }
  static VecBits encode(Vec x) { return reinterpret_cast<VecBits>(nearest_integer(x)); }
};

template <class K>
constexpr bool kHoldsCodes = !std::is_same_v<K, float> && !std::is_same_v<K, bf16>;

inline VecBits widened_bytes(const uint8_t* from, AllLanes) {
#if defined(__AVX512F__)
  // GCC 12 converts bytes one by one.
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<VecBits>(_mm512_maskz_cvtepu8_epi32(0xffff, bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<VecBits>(_mm256_cvtepu8_epi32(bytes));
#else
  VecBits bits;
  for (int i = 0; i < kLanes; i++) bits[i] = from[i];
  return bits;
#endif
}

inline VecBits widened_bytes(const uint8_t* from, int64_t count) {
  uint8_t bytes[kLanes] = {};
  std::memcpy(bytes, from, static_cast<size_t>(std::min<int64_t>(count, kLanes)));
  return widened_bytes(bytes, AllLanes{});
}

struct CodeRow {
  const uint8_t* codes;
  const uint8_t* scales;  // of the first group, bf16; those of the next are block_size further
};

template <class Format>
struct CacheOfCodes {
  using Row = CodeRow;
  int64_t channels, block_size, width, groups;  // width: channels of a group
  // Of 2^32, rounded up: divides a channel by the width where a division would take longer than all else.
  uint64_t inverse_width;
  bool one_scale_a_vector;

  CacheOfCodes(int64_t channels, int64_t block_size, int64_t group)
      : channels(channels),
        block_size(block_size),
        width(group == 0 ? channels : group),
        groups(channels / width),
        inverse_width(((uint64_t{1} << 32) + static_cast<uint64_t>(width) - 1) / static_cast<uint64_t>(width)),
        one_scale_a_vector(width % kLanes == 0) {}
  int64_t row_bytes() const { return Format::kNibbles ? channels / 2 : channels; }  // codes
  int64_t head_bytes() const { return block_size * (row_bytes() + groups * (Format::kNibbles ? 4 : 2)); }
  Row row(const void* block, int64_t position) const {
    const auto* data = static_cast<const uint8_t*>(block);
    return {data + position * row_bytes(), data + block_size * row_bytes() + 2 * position};
  }
  Row next(Row row) const { return {row.codes + row_bytes(), row.scales + 2}; }
  static Row moved(Row row, int64_t bytes) { return {row.codes + bytes, row.scales + bytes}; }
  static const void* address(Row row) { return row.codes; }

  template <class Lanes>
  Vec values(Row row, int64_t channel, Lanes lanes) const {
    const Vec x = Format::value(codes(row, channel, lanes)) * of_groups(row.scales, channel);
    if constexpr (!Format::kNibbles) return x;
    return x + of_groups(row.scales + groups * block_size * 2, channel);
  }
  // Whole vectors: a scale is read once for all that share it.
  template <int VECTORS>
  void values(Row row, int64_t channel, Vec (&to)[VECTORS]) const {
    if (groups > 1 && !one_scale_a_vector) {
      for (int v = 0; v < VECTORS; v++) to[v] = values(row, channel + v * kLanes, AllLanes{});
      return;
    }
    int64_t end = channel;
    Vec scale = {}, least = {};
    for (int v = 0; v < VECTORS; v++, channel += kLanes) {
      if (channel >= end) {
        const int64_t group = group_of(channel);
        end = (group + 1) * width;
        scale = broadcast(bf16_at(row.scales + group * block_size * 2));
        if constexpr (Format::kNibbles) least = broadcast(bf16_at(row.scales + (groups + group) * block_size * 2));
      }
      to[v] = Format::value(codes(row, channel, AllLanes{})) * scale;
      if constexpr (Format::kNibbles) to[v] = to[v] + least;
    }
  }
  int64_t group_of(int64_t channel) const {
    return static_cast<int64_t>(static_cast<uint64_t>(channel) * inverse_width >> 32);
  }

 private:
  static float bf16_at(const uint8_t* from) {
    bf16 value;
    std::memcpy(&value, from, sizeof value);
    return to_float(value);
  }

  template <class Lanes>
  VecBits codes(Row row, int64_t channel, Lanes lanes) const {
    if constexpr (!Format::kNibbles) {
      return widened_bytes(row.codes + channel, lanes);
    } else {
      const int64_t half = channels / 2;
      if (channel + kLanes <= half) return widened_bytes(row.codes + channel, lanes) & 15u;
      if (channel >= half) return widened_bytes(row.codes + channel - half, lanes) >> 4;
      VecBits bits = {};
      for (int64_t c = channel; c < std::min(channel + kLanes, channels); c++)
        bits[c - channel] = c < half ? row.codes[c] & 15u : row.codes[c - half] >> 4;
      return bits;
    }
  }

  // The scales or minima, of which `first` is that of the first group, of channels from `channel` on.
  Vec of_groups(const uint8_t* first, int64_t channel) const {
    if (groups == 1) return broadcast(bf16_at(first));
    const auto of_channel = [&](int64_t c) { return bf16_at(first + group_of(c) * block_size * 2); };
    if (one_scale_a_vector) return broadcast(of_channel(channel));
    Vec x = {};
    for (int64_t c = channel; c < std::min(channel + kLanes, channels); c++) x[c - channel] = of_channel(c);
    return x;
  }
};

template <class K>
using Cache = std::conditional_t<kHoldsCodes<K>, CacheOfCodes<K>, CacheOf<K>>;

}  // namespace llmc
