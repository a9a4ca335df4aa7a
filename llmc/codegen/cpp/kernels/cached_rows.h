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
inline VecBits widened_bytes(const uint8_t* from) {
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

// A format: value(code) for codes in the low bytes of lanes, or, where a byte has two, in the given half of them;
// encode(x) for |x| <= kLargest, in the low bits of lanes. Where a byte has one: quad_value(words, i) · kQuadFactor for
// the codes in byte i of words, and load_values for the codes of kLanes bytes.
struct Int8Cache {
  static constexpr bool kNibbles = false;
  static constexpr float kLargest = 127.0f;
  static Vec value(VecBits code, int = 0) {
    return __builtin_convertvector(reinterpret_cast<VecInt>(code << 24) >> 24, Vec);
  }
  // Codes stay in the highest byte, because shifting them back takes longer than all else.
  static constexpr float kQuadFactor = 0x1p-24f;
  static Vec quad_value(VecBits words, int byte) {
    return __builtin_convertvector(reinterpret_cast<VecInt>(words << (24 - 8 * byte) & 0xff000000u), Vec);
  }
  static Vec load_values(const uint8_t* from) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return __builtin_convertvector(reinterpret_cast<VecInt>(_mm512_maskz_cvtepi8_epi32(0xffff, bytes)), Vec);
#else
    return value(widened_bytes(from));
#endif
  }
  static VecBits encode(Vec x) { return reinterpret_cast<VecBits>(nearest_integer(x)); }
};

struct Fp8Cache {
  static constexpr bool kNibbles = false;
  static constexpr float kLargest = 448.0f;
  static Vec value(VecBits code, int = 0) { return e4m3_value(code); }
  static constexpr float kQuadFactor = 1.0f;
  static Vec quad_value(VecBits words, int byte) { return value(words >> 8 * byte); }
  static Vec load_values(const uint8_t* from) { return value(widened_bytes(from)); }
  static VecBits encode(Vec x) { return e4m3_code(x); }
};

// Two channels a byte, half a head apart; a minimum is added.
struct Int4Cache {
  static constexpr bool kNibbles = true;
  static constexpr float kLargest = 15.0f;
  static constexpr float kQuadFactor = 1.0f;
  static Vec value(VecBits code, int half) {
    return __builtin_convertvector(reinterpret_cast<VecInt>(code >> 4 * half & 15u), Vec);
  }
  static VecBits encode(Vec x) { return reinterpret_cast<VecBits>(nearest_integer(x)); }
};

template <class K>
constexpr bool kHoldsCodes = !std::is_same_v<K, float> && !std::is_same_v<K, bf16>;

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

  CacheOfCodes(int64_t channels, int64_t block_size, int64_t group)
      : channels(channels),
        block_size(block_size),
        width(group == 0 ? channels : group),
        groups(channels / width),
        inverse_width(((uint64_t{1} << 32) + static_cast<uint64_t>(width) - 1) / static_cast<uint64_t>(width)) {}
  int64_t row_bytes() const { return Format::kNibbles ? channels / 2 : channels; }  // codes
  static constexpr int64_t kNumbers = Format::kNibbles ? 2 : 1;  // a scale and a minimum
  int64_t numbers() const { return kNumbers * groups; }          // of a row
  int64_t head_bytes() const { return block_size * (row_bytes() + 2 * numbers()); }
  Row row(const void* block, int64_t position) const {
    const auto* data = static_cast<const uint8_t*>(block);
    return {data + position * row_bytes(), data + block_size * row_bytes() + 2 * position};
  }
  Row next(Row row) const { return {row.codes + row_bytes(), row.scales + 2}; }
  static Row moved(Row row, int64_t bytes) { return {row.codes + bytes, row.scales + bytes}; }
  static const void* address(Row row) { return row.codes; }

  // Whether four bytes of a row that follow each other share scales: then attention multiplies keys' codes as they are.
  bool has_quads() const { return width % 4 == 0 && row_bytes() % 4 == 0; }
  // Whether vectors of a row's bytes do: the same of values' codes.
  bool has_vectors() const { return row_bytes() % kLanes == 0 && (groups == 1 || width % kLanes == 0); }
  // The first channel of a vector of codes, in the order of the bytes; where a byte has two, the low halves come first.
  int64_t channel_of(int64_t place) const {
    if constexpr (!Format::kNibbles) return place;
    const int64_t vector = place / kLanes;
    return vector / 2 * kLanes + vector % 2 * row_bytes();
  }

  // The numbers themselves, zero from channels on.
  Vec values(Row row, int64_t channel) const {
    Vec x = {};
    for (int64_t c = channel; c < std::min(channel + kLanes, channels); c++) x[c - channel] = value(row, c);
    return x;
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

  float value(Row row, int64_t channel) const {
    const bool high = Format::kNibbles && channel >= row_bytes();
    const VecBits code = VecBits{} + row.codes[channel - (high ? row_bytes() : 0)];
    const uint8_t* scale = row.scales + group_of(channel) * block_size * 2;
    const float x = Format::value(code, high)[0] * bf16_at(scale);
    if constexpr (!Format::kNibbles) return x;
    return x + bf16_at(scale + groups * block_size * 2);
  }
};

template <class K>
using Cache = std::conditional_t<kHoldsCodes<K>, CacheOfCodes<K>, CacheOf<K>>;

}  // namespace llmc
