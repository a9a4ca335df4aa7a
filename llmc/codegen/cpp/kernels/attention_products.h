// The two matrix products inside attention, over tiles that are packed for them.
//
// Sums run over channels, and over keys, one at a time and in order, whatever number of rows is done together: a row's
// result has the same bits in every company.
#pragma once
#include <type_traits>

#include "row.h"
#include "transpose.h"

namespace llmc {

constexpr int kAttentionKeys = 64;  // keys in a tile

// What one step along the channels multiplies: one channel in fp32, or two in bf16 where the processor has that.
struct FloatSteps {
  using Step = float;
  static constexpr int kChannels = 1;
  template <class T>
  static Vec load_steps(const T* from, AllLanes) {
    return load(from);
  }
  template <class T>
  static Vec load_steps(const T* from, int64_t channels) {
    return load(from, channels);
  }
  static Vec multiply_add(float q, Vec keys, Vec sum) { return fma(broadcast(q), keys, sum); }
};

#if defined(__AVX512BF16__)
struct PairSteps {
  using Step = uint32_t;
  static constexpr int kChannels = 2;
  static Vec load_steps(const bf16* from, AllLanes) { return reinterpret_cast<Vec>(_mm512_loadu_si512(from)); }
  static Vec load_steps(const bf16* from, int64_t channels) {
    return reinterpret_cast<Vec>(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << channels) - 1), from));
  }
  static Vec multiply_add(uint32_t q, Vec keys, Vec sum) {
    const __m512i pair = _mm512_set1_epi32(static_cast<int>(q));
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(pair), reinterpret_cast<__m512bh>(keys));
  }
};
template <class Q, class K>
using StepsOf = std::conditional_t<std::is_same_v<Q, bf16> && std::is_same_v<K, bf16>, PairSteps, FloatSteps>;
#else
template <class Q, class K>
using StepsOf = FloatSteps;
#endif

template <class Steps>
inline int64_t steps_of(int64_t channels) {
  return (channels + Steps::kChannels - 1) / Steps::kChannels;
}

// Calls body(first channel, lanes or channels left) for each vector of steps.
template <class Steps, class Body>
inline void for_step_vectors(int64_t channels, const Body& body) {
  constexpr int64_t kChannels = kLanes * Steps::kChannels;
  int64_t channel = 0;
  for (; channel + kChannels <= channels; channel += kChannels) body(channel, AllLanes{});
  if (channel < channels) body(channel, channels - channel);
}

// packed[step], the last one padded with zeros; written in whole vectors.
template <class Steps, class T>
inline void pack_query(const T* q, int64_t channels, float* packed) {
  for_step_vectors<Steps>(channels, [&](int64_t channel, auto lanes) {
    store(packed + channel / Steps::kChannels, Steps::load_steps(q + channel, lanes));
  });
}

// Starts to fetch the line at a pointer when a walk in vectors of T comes to a new one.
template <class T>
inline void prefetch_at(const T* from, int64_t channel) {
  constexpr int64_t kLine = 64 / sizeof(T);
  if (channel % kLine == 0) __builtin_prefetch(from + channel);
}

// Rows of the cache, one for each key of a tile: they lie block by block, and for one head after the other.
template <class T>
struct CachedRows {
  const T* const* first_head;
  int64_t offset;  // of the head that is meant, from the first
  const T* row(int64_t key) const { return first_head[key] + offset; }
};

// packed[step][key]. Fetches `next` meanwhile.
template <class Steps, class T>
inline void pack_keys(CachedRows<T> keys, CachedRows<T> next, int64_t channels, float* packed) {
  for (int64_t key = 0; key < kAttentionKeys; key += kLanes) {
    for_step_vectors<Steps>(channels, [&](int64_t channel, auto lanes) {
      Vec square[kLanes];
      for (int i = 0; i < kLanes; i++) {
        square[i] = Steps::load_steps(keys.row(key + i) + channel, lanes);
        prefetch_at(next.row(key + i), channel);
      }
      transpose(square);
      const int64_t step = channel / Steps::kChannels;
      const int64_t left = steps_of<Steps>(channels) - step;
      for (int i = 0; i < kLanes && i < left; i++) store(packed + (step + i) * kAttentionKeys + key, square[i]);
    });
  }
}

// Values of a tile where they lie in the cache, and those to fetch meanwhile.
template <class T>
struct CachedValues {
  CachedRows<T> now, next;
  const T* row(int64_t key) const { return now.row(key); }
  void prefetch(int64_t key, int64_t channel) const { prefetch_at(next.row(key), channel); }
};

// The same in fp32, in rows padded with zeros to whole vectors: worth its cost when many queries share them.
struct PackedValues {
  const float* data;
  int64_t stride;
  const float* row(int64_t key) const { return data + key * stride; }
  void prefetch(int64_t, int64_t) const {}
};

template <class T>
inline void pack_values(const CachedValues<T>& values, int64_t channels, int64_t stride, float* packed) {
  for (int64_t key = 0; key < kAttentionKeys; key++)
    for_vectors(channels, [&](int64_t c, auto lanes) {
      store(packed + key * stride + c, load(values.row(key) + c, lanes));
      values.prefetch(key, c);
    });
}

// Calls body(row, integral_constant<number of rows>) for blocks of four rows and the rest.
template <class Body>
inline void for_row_blocks(int64_t rows, const Body& body) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) body(row, std::integral_constant<int, 4>{});
  if (rows - row == 3) body(row, std::integral_constant<int, 3>{});
  if (rows - row == 2) body(row, std::integral_constant<int, 2>{});
  if (rows - row == 1) body(row, std::integral_constant<int, 1>{});
}

// With four rows: 16 sums of 32 registers, or 8 of 16.
constexpr int kBlockVectors = kLanes == 16 ? 4 : 2;
constexpr int kBlockKeys = kBlockVectors * kLanes;

// scores[row][key] = q[row] · keys for kBlockKeys keys; rows of scores are kAttentionKeys apart.
template <class Steps, int ROWS>
inline void score_block(const float* q, int64_t q_stride, const float* keys, int64_t steps, float* scores) {
  Vec sums[ROWS][kBlockVectors] = {};
  for (int64_t step = 0; step < steps; step++) {
    Vec k[kBlockVectors];
    for (int v = 0; v < kBlockVectors; v++) k[v] = load(keys + step * kAttentionKeys + v * kLanes);
    for (int r = 0; r < ROWS; r++) {
      typename Steps::Step pair;
      std::memcpy(&pair, q + r * q_stride + step, sizeof pair);
      for (int v = 0; v < kBlockVectors; v++) sums[r][v] = Steps::multiply_add(pair, k[v], sums[r][v]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < kBlockVectors; v++) store(scores + r * kAttentionKeys + v * kLanes, sums[r][v]);
}

// sums[row] = sums[row]·decay[row] + probabilities[row][key] · values[key], over keys first to last, for VECTORS
// vectors from `channel` on; rows of sums are `stride` apart.
template <int ROWS, int VECTORS, class Values>
inline void value_block(const float* probabilities, int64_t first, int64_t last, const Values& values, int64_t channel,
                        const float* decay, float* to, int64_t stride) {
  Vec sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) sums[r][v] = load(to + r * stride + channel + v * kLanes) * decay[r];
  for (int64_t key = first; key < last; key++) {
    Vec x[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
      x[v] = load(values.row(key) + channel + v * kLanes);
      values.prefetch(key, channel + v * kLanes);
    }
    for (int r = 0; r < ROWS; r++) {
      const Vec p = broadcast(probabilities[r * kAttentionKeys + key]);
      for (int v = 0; v < VECTORS; v++) sums[r][v] = fma(p, x[v], sums[r][v]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) store(to + r * stride + channel + v * kLanes, sums[r][v]);
}

// The same for all `stride` channels, a multiple of kLanes.
template <int ROWS, class Values>
inline void add_values(const float* probabilities, int64_t first, int64_t last, const Values& values,
                       const float* decay, float* to, int64_t stride) {
  int64_t c = 0;
  for (; c + kBlockVectors * kLanes <= stride; c += kBlockVectors * kLanes)
    value_block<ROWS, kBlockVectors>(probabilities, first, last, values, c, decay, to, stride);
  for (; c < stride; c += kLanes) value_block<ROWS, 1>(probabilities, first, last, values, c, decay, to, stride);
}

}  // namespace llmc
