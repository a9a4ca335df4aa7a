// The keys of a tile, turned so that a step of all keys lies together.
#pragma once
#include "attention_products.h"

namespace llmc {

// kLanes words of 32 bits, of which `bytes` are there; the rest reads as zero.
inline VecBits load_words(const void* from, int64_t bytes) {
  constexpr int64_t kAll = kLanes * 4;
#if defined(__AVX512BW__)
  const __mmask64 there = bytes >= kAll ? ~__mmask64{0} : (__mmask64{1} << bytes) - 1;
  return reinterpret_cast<VecBits>(_mm512_maskz_loadu_epi8(there, from));
#else
  VecBits words = {};
  if (bytes >= kAll)
    std::memcpy(&words, from, sizeof words);
  else
    std::memcpy(&words, from, static_cast<size_t>(bytes));
  return words;
#endif
}

// What words of kLanes rows stand for, with a lane for each row: decode(words, index, emit) calls
// emit(channel, numbers) for each channel of the word `index` of the rows, which come in ascending order.
template <class K>
struct WordsOfRows;

template <>
struct WordsOfRows<bf16> {
  int64_t channels;
  WordsOfRows(const Cache<bf16>& cache, const bf16* const*, int64_t) : channels(cache.channels) {}

  template <class Emit>
  void decode(VecBits words, int64_t index, const Emit& emit) {
    emit(2 * index, from_bits(words << 16));
    if (2 * index + 1 < channels) emit(2 * index + 1, from_bits(words & 0xffff0000u));
  }
};

template <class Format>
struct WordsOfRows {
  // Scales, and minima, of the group that a channel is in, up to the channel `end`.
  struct Group {
    int64_t end = 0;
    Vec scale = {}, least = {};
  };
  const Cache<Format>& cache;
  const CodeRow* rows;
  int64_t offset;
  bool neighbours = true;  // in one block, where a group's scales follow each other
  Group low, high;         // of the channels of a byte, half a head apart

  WordsOfRows(const Cache<Format>& cache, const CodeRow* rows, int64_t offset)
      : cache(cache), rows(rows), offset(offset) {
    for (int i = 1; i < kLanes; i++) neighbours &= rows[i].scales == rows[0].scales + 2 * i;
  }

  template <class Emit>
  void decode(VecBits words, int64_t index, const Emit& emit) {
    const int64_t half = cache.row_bytes();
    for (int64_t channel = 4 * index; channel < std::min(4 * index + 4, half); channel++, words >>= 8) {
      if constexpr (Format::kNibbles) {
        emit(channel, number(words & 15u, channel, low));
        emit(channel + half, number(words >> 4 & 15u, channel + half, high));
      } else {
        emit(channel, number(words, channel, low));
      }
    }
  }

 private:
  Vec number(VecBits code, int64_t channel, Group& group) const {
    if (channel >= group.end) {
      const int64_t index = cache.group_of(channel);
      group.end = (index + 1) * cache.width;
      group.scale = of_rows(index);
      if constexpr (Format::kNibbles) group.least = of_rows(cache.groups + index);
    }
    const Vec x = Format::value(code) * group.scale;
    if constexpr (!Format::kNibbles) return x;
    return x + group.least;
  }

  Vec of_rows(int64_t group) const {
    const int64_t at = offset + group * cache.block_size * 2;
    uint16_t halves[kLanes];
    if (!neighbours)
      for (int i = 0; i < kLanes; i++) std::memcpy(halves + i, rows[i].scales + at, sizeof halves[i]);
    VecHalves found;
    std::memcpy(&found, neighbours ? static_cast<const void*>(rows[0].scales + at) : halves, sizeof found);
    return widen(found);
  }
};

// packed[step][key]. Fetches the first quarter.
template <class Steps, class T>
inline void pack_keys(CachedRows<T> keys, int64_t channels, const FetchNext<T>& fetch, float* packed) {
  for (int64_t key = 0; key < kAttentionKeys; key += kLanes) {
    if constexpr (Steps::kWidth == 1 && !std::is_same_v<T, float>) {
      WordsOfRows<T> rows(keys.cache, keys.first_head + key, keys.offset);
      const int64_t bytes = keys.cache.row_bytes();
      for (int64_t byte = 0; byte < bytes; byte += kLanes * 4) {
        Vec square[kLanes];  // no numbers yet: only moved
        for (int i = 0; i < kLanes; i++) {
          const auto* from = static_cast<const uint8_t*>(Cache<T>::address(keys.row(key + i)));
          square[i] = from_bits(load_words(from + byte, bytes - byte));
        }
        transpose(square);
        const int64_t count = std::min<int64_t>(kLanes, (bytes - byte + 3) / 4);
        for (int64_t i = 0; i < count; i++)
          rows.decode(bits_of(square[i]), byte / 4 + i,
                      [&](int64_t channel, Vec x) { store(packed + channel * kAttentionKeys + key, x); });
      }
    } else {
      for_step_vectors<Steps>(channels, [&](int64_t channel, auto lanes) {
        Vec square[kLanes];
        for (int i = 0; i < kLanes; i++) square[i] = keys.template load_steps<Steps>(key + i, channel, lanes);
        transpose(square);
        float* to = packed + channel / Steps::kWidth * kAttentionKeys + key;
        const int64_t steps = steps_of<Steps>(channels - channel);
        if (steps >= kLanes) {
          for (int i = 0; i < kLanes; i++) store(to + i * kAttentionKeys, square[i]);
        } else {
          for (int i = 0; i < steps; i++) store(to + i * kAttentionKeys, square[i]);
        }
      });
    }
    for (int64_t next = key / 4; next < (key + kLanes) / 4; next++) fetch.row(next);
  }
}

}  // namespace llmc
