// The keys of a tile, turned so that a step of all keys lies together.
#pragma once
#include "attention_products.h"

namespace llmc {

// Loads kLanes words of 32 bits. Only the first `bytes` bytes exist; the rest reads as zero.
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

// packed[step][key]. Fetches for kPack.
template <class Steps, class T, class Fetch>
inline void pack_keys(CachedRows<T> keys, int64_t channels, const Fetch& fetch, float* packed) {
  for (int64_t key = 0; key < kAttentionKeys; key += kLanes) {
    if constexpr (Steps::kWidth == 1 && std::is_same_v<T, bf16>) {
      const int64_t bytes = keys.cache.row_bytes();
      for (int64_t byte = 0; byte < bytes; byte += kLanes * 4) {
        Vec square[kLanes];  // no numbers yet: only moved
        for (int i = 0; i < kLanes; i++) {
          const auto* from = static_cast<const uint8_t*>(Cache<T>::address(keys.row(key + i)));
          square[i] = from_bits(load_words(from + byte, bytes - byte));
        }
        transpose(square);
        const int64_t count = std::min<int64_t>(kLanes, (bytes - byte + 3) / 4);
        for (int64_t i = 0; i < count; i++) {
          const int64_t channel = byte / 2 + 2 * i;
          float* to = packed + channel * kAttentionKeys + key;
          store(to, from_bits(bits_of(square[i]) << 16));
          if (channel + 1 < channels) store(to + kAttentionKeys, from_bits(bits_of(square[i]) & 0xffff0000u));
        }
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
    for (int64_t next = key / 4; next < (key + kLanes) / 4; next++) fetch.rows(FetchStage::kPack, next);
  }
}

}  // namespace llmc
