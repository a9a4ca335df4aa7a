// The two matrix products inside attention, over tiles that are packed for them.
//
// Sums run over channels, and over keys, one at a time and in order, whatever number of rows is done together: a row's
// result has the same bits in every company.
#pragma once
#include "cached_rows.h"
#include "transpose.h"

namespace llmc {

constexpr int kAttentionKeys = 64;  // keys in a tile

// One step of a product multiplies one number in fp32, or two in bf16 if the processor supports it. Steps run along the
// channels for scores and along the keys for values; in bf16 probabilities are rounded as keys are.
struct FloatSteps {
  using Step = float;
  static constexpr int kWidth = 1;
  static Vec multiply_add(float a, Vec b, Vec sum) { return fma(broadcast(a), b, sum); }

  // The steps of one row.
  template <class T, class Lanes>
  static Vec load_steps(const T* from, Lanes channels) {
    return load(from, channels);
  }
  template <class K>
  static Vec load_codes(const Cache<K>& cache, CodeRow row, int64_t channel) {
    return cache.values(row, channel);
  }
  template <class K>
  static Vec load_codes_across(const Cache<K>& cache, const CodeRow (&rows)[1], int64_t channel) {
    return cache.values(rows[0], channel);
  }
  // A channel of a query in the order of for_quads.
  template <class T>
  static void store_channel(float* row, int64_t channel, T x) {
    row[channel] = to_float(x);
  }
  // Calls emit(half of the bytes, step, numbers) for the codes of four channels in each lane. Numbers are divided by the
  // format's kQuadFactor.
  template <class Format, class Emit>
  static void for_quads(VecBits words, const Emit& emit) {
    for (int step = 0; step < 4; step++)
      if constexpr (Format::kNibbles) {
        emit(0, step, Format::value(words >> 8 * step, 0));
        emit(1, step, Format::value(words >> 8 * step, 1));
      } else {
        emit(0, step, Format::quad_value(words, step));
      }
  }
  // One step of kLanes bytes of codes across rows; where bytes have two, of either half.
  template <class Format>
  __attribute__((always_inline)) static void load_numbers(const uint8_t* const (&rows)[1], int64_t byte, Vec* to) {
    if constexpr (Format::kNibbles) {
      const VecBits codes = widened_bytes(rows[0] + byte);
      for (int half = 0; half < 2; half++) to[half] = Format::value(codes, half);
    } else {
      to[0] = Format::load_values(rows[0] + byte);
    }
  }
  // One step across rows.
  template <class T, class Lanes>
  static Vec load_across(const T* (&rows)[1], int64_t channel, Lanes lanes) {
    return load(rows[0] + channel, lanes);
  }
  template <class T, int VECTORS>
  __attribute__((always_inline)) static void load_across(const T* (&rows)[1], int64_t channel, Vec (&to)[VECTORS]) {
    for (int v = 0; v < VECTORS; v++) to[v] = load(rows[0] + channel + v * kLanes);
  }
  // Writes probabilities as steps and returns what they became.
  static Vec store_steps(float* row, int key, Vec probabilities) {
    store(row + key, probabilities);
    return probabilities;
  }
};

#if defined(__AVX512BF16__)
struct PairSteps {
  using Step = uint32_t;
  static constexpr int kWidth = 2;
  static Vec multiply_add(uint32_t a, Vec b, Vec sum) {
    const __m512i pair = _mm512_set1_epi32(static_cast<int>(a));
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(pair), reinterpret_cast<__m512bh>(b));
  }
  static Vec load_steps(const bf16* from, AllLanes) { return reinterpret_cast<Vec>(_mm512_loadu_si512(from)); }
  static Vec load_steps(const bf16* from, int64_t channels) {
    return reinterpret_cast<Vec>(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << channels) - 1), from));
  }
  template <class K>
  static Vec load_codes(const Cache<K>& cache, CodeRow row, int64_t channel) {
    return reinterpret_cast<Vec>(
        _mm512_cvtne2ps_pbh(cache.values(row, channel + kLanes), cache.values(row, channel)));
  }
  template <class K>
  static Vec load_codes_across(const Cache<K>& cache, const CodeRow (&rows)[2], int64_t channel) {
    return in_pairs(widen(narrow(cache.values(rows[0], channel))), widen(narrow(cache.values(rows[1], channel))));
  }
  // Pairs are every other channel of four.
  static void store_channel(float* row, int64_t channel, bf16 x) {
    std::memcpy(reinterpret_cast<bf16*>(row) + channel / 4 * 4 + channel % 2 * 2 + channel / 2 % 2, &x, sizeof x);
  }
  template <class Format, class Emit>
  static void for_quads(VecBits words, const Emit& emit) {
    for (int step = 0; step < 2; step++)
      if constexpr (Format::kNibbles) {
        emit(0, step, nibble_pairs(words >> 8 * step));
        emit(1, step, nibble_pairs(words >> (8 * step + 4)));
      } else {
        emit(0, step, in_pairs(Format::quad_value(words, step), Format::quad_value(words, step + 2)));
      }
  }
  template <class Format>
  __attribute__((always_inline)) static void load_numbers(const uint8_t* const (&rows)[2], int64_t byte, Vec* to) {
    if constexpr (Format::kNibbles) {
      const VecBits both = widened_bytes(rows[0] + byte) | widened_bytes(rows[1] + byte) << 16;
      to[0] = nibble_pairs(both);
      to[1] = nibble_pairs(both >> 4);
    } else {
      to[0] = in_pairs(Format::load_values(rows[0] + byte), Format::load_values(rows[1] + byte));
    }
  }
  template <class Lanes>
  static Vec load_across(const bf16* (&rows)[2], int64_t channel, Lanes lanes) {
    return from_bits(bits_of(load(rows[0] + channel, lanes)) >> 16 | bits_of(load(rows[1] + channel, lanes)));
  }
  template <int VECTORS>
  __attribute__((always_inline)) static void load_across(const bf16* (&rows)[2], int64_t channel, Vec (&to)[VECTORS]) {
    if constexpr (VECTORS % 2 == 0) {
      const __m512i low = interleaved(0), high = interleaved(16);
      for (int v = 0; v < VECTORS; v += 2) {
        const __m512i even = _mm512_loadu_si512(rows[0] + channel + v * kLanes);
        const __m512i odd = _mm512_loadu_si512(rows[1] + channel + v * kLanes);
        to[v] = reinterpret_cast<Vec>(_mm512_permutex2var_epi16(even, low, odd));
        to[v + 1] = reinterpret_cast<Vec>(_mm512_permutex2var_epi16(even, high, odd));
      }
    } else {
      for (int v = 0; v < VECTORS; v++) to[v] = load_across(rows, channel + v * kLanes, AllLanes{});
    }
  }
  static Vec store_steps(float* row, int key, Vec probabilities) {
    const VecHalves rounded = narrow(probabilities);
    std::memcpy(row + key / 2, &rounded, sizeof rounded);
    return widen(rounded);
  }

 private:
  // (first, 32 + first, first + 1, 33 + first, …): which 16 bits of two registers follow each other.
  static __m512i interleaved(int first) {
    VecBits pairs = {};
    for (unsigned i = 0; i < kLanes; i++) pairs[i] = (first + i) | (32 + first + i) << 16;
    return reinterpret_cast<__m512i>(pairs);
  }
  // Numbers that are exact in bf16.
  static Vec in_pairs(Vec low, Vec high) {
    const __m512i upper_halves = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
    constexpr __mmask64 kLowerHalves = 0x3333333333333333;
    return reinterpret_cast<Vec>(_mm512_mask_shuffle_epi8(reinterpret_cast<__m512i>(high), kLowerHalves,
                                                          reinterpret_cast<__m512i>(low), upper_halves));
  }

  // The numbers 0 … 15 that the low four of each 16 bits are: the table has them twice, for whatever the fifth bit is.
  static Vec nibble_pairs(VecBits codes) {
    alignas(64) static constexpr uint16_t kNumbers[32] = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
        0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const __m512i table = _mm512_load_si512(kNumbers), at = reinterpret_cast<__m512i>(codes);
    return reinterpret_cast<Vec>(_mm512_maskz_permutexvar_epi16(~__mmask32{0}, at, table));
  }
};
template <class Q, class K>
using StepsOf = std::conditional_t<std::is_same_v<Q, bf16> && !std::is_same_v<K, float>, PairSteps, FloatSteps>;
#else
template <class Q, class K>
using StepsOf = FloatSteps;
#endif

template <class Steps>
inline int64_t steps_of(int64_t count) {
  return (count + Steps::kWidth - 1) / Steps::kWidth;
}

// Calls body(first channel, lanes or channels left) for each vector of steps.
template <class Steps, class Body>
inline void for_step_vectors(int64_t channels, const Body& body) {
  constexpr int64_t kChannels = kLanes * Steps::kWidth;
  int64_t channel = 0;
  for (; channel + kChannels <= channels; channel += kChannels) body(channel, AllLanes{});
  if (channel < channels) body(channel, channels - channel);
}

// packed[step], the last one padded with zeros; written in whole vectors.
template <class Steps, class T>
inline void pack_query(const T* q, int64_t channels, float* packed) {
  for_step_vectors<Steps>(channels, [&](int64_t channel, auto lanes) {
    store(packed + channel / Steps::kWidth, Steps::load_steps(q + channel, lanes));
  });
}

// Rows of the cache, one for each key of a tile: they lie block by block, and for one head after the other.
template <class K>
struct CachedRows {
  using Row = typename Cache<K>::Row;
  const Cache<K>& cache;
  const Row* first_head;
  int64_t offset;  // bytes to the head that is meant, from the first
  const bool* in_order;  // of each kLanes keys: whether they follow each other in one block

  Row row(int64_t key) const { return Cache<K>::moved(first_head[key], offset); }
  template <class Steps, class Lanes>
  Vec load_steps(int64_t key, int64_t channel, Lanes lanes) const {
    if constexpr (kHoldsCodes<K>)
      return Steps::template load_codes<K>(cache, row(key), channel);
    else
      return Steps::load_steps(row(key) + channel, lanes);
  }
};

// Fetches the keys and values that come next while this tile is worked on. Blocks lie anywhere, so the processor does
// not see them coming; and asked for all at once, they would fill its miss buffers and make it wait (20 instead of
// 26 GB/s on one core of a Zen 5). So each of four stages of the work asks for a part, line by line. Keys in codes come
// first, because all of them are needed first. Caches of numbers are limited by memory bandwidth, which is higher if
// keys and values alternate.
constexpr int64_t kFetchSlots = kAttentionKeys / 4;  // of a stage: one row of each cache, or two of one
constexpr int64_t kFetchScales = 16;                 // keys whose scales of a group are taken to lie in one line
enum class FetchStage { kPack, kScore, kSoftmax, kValues };

template <class K, class V = K>
struct FetchNext {
  CachedRows<K> keys;
  CachedRows<V> values;
  int64_t key_bytes, value_bytes;  // of a row; zero: fetch nothing

  // Always inline: GCC drops calls of a function that does nothing but prefetch.
  __attribute__((always_inline)) void rows(FetchStage stage, int64_t slot) const {
    for (int64_t index = 0; index * 64 < std::max(key_bytes, value_bytes); index++) line(stage, slot, index);
  }
  // One line of each row in every step of a product: first the line `index` of all slots, then the next lines.
  __attribute__((always_inline)) void step(FetchStage stage, int64_t step, int64_t index = 0) const {
    const auto steps = static_cast<uint64_t>(step), slots = static_cast<uint64_t>(kFetchSlots);  // cheap remainders
    line(stage, static_cast<int64_t>(steps % slots), index + static_cast<int64_t>(steps / slots));
  }
  // Fetches the scales of kFetchScales keys.
  __attribute__((always_inline)) void scales(int64_t key) const {
    if constexpr (kHoldsCodes<K>) {
      if (key_bytes == 0) return;
      fetch_scales(keys, key);
      fetch_scales(values, key);
    }
  }

 private:
  __attribute__((always_inline)) void line(FetchStage stage, int64_t slot, int64_t index) const {
    const auto number = static_cast<int64_t>(stage);
    if constexpr (kHoldsCodes<K>) {
      const int64_t key = number % 2 * (kAttentionKeys / 2) + 2 * slot;
      if (number < 2)
        fetch_two(keys, key_bytes, key, index * 64);
      else
        fetch_two(values, value_bytes, key, index * 64);
    } else {
      fetch(keys, key_bytes, number * kFetchSlots + slot, index * 64);
      fetch(values, value_bytes, number * kFetchSlots + slot, index * 64);
    }
  }
  template <class C>
  __attribute__((always_inline)) static void fetch(const CachedRows<C>& rows, int64_t bytes, int64_t key, int64_t byte) {
    if (byte < bytes) __builtin_prefetch(static_cast<const uint8_t*>(Cache<C>::address(rows.row(key))) + byte);
  }
  template <class C>
  __attribute__((always_inline)) static void fetch_two(const CachedRows<C>& rows, int64_t bytes, int64_t key,
                                                       int64_t byte) {
    fetch(rows, bytes, key, byte);
    if (bytes != 32) fetch(rows, bytes, key + 1, byte);  // else both lie in one line
  }
  template <class C>
  __attribute__((always_inline)) static void fetch_scales(const CachedRows<C>& rows, int64_t key) {
    for (int64_t number = 0; number < rows.cache.numbers(); number++)
      __builtin_prefetch(rows.row(key).scales + number * rows.cache.block_size * 2);
  }
};

// Values of a tile where they lie in the cache.
template <class Steps, class K>
struct CachedValues {
  CachedRows<K> values;

  template <class Lanes>
  Vec load(int64_t step, int64_t channel, Lanes lanes) const {
    typename Cache<K>::Row rows[Steps::kWidth];
    find(step, rows);
    if constexpr (kHoldsCodes<K>)
      return Steps::template load_codes_across<K>(values.cache, rows, channel);
    else
      return Steps::load_across(rows, channel, lanes);
  }
  // Always inline, as all that a product's loop calls: a call would move its sums to memory and back.
  template <int VECTORS>
  __attribute__((always_inline)) void load(int64_t step, int64_t channel, Vec (&to)[VECTORS]) const {
    typename Cache<K>::Row rows[Steps::kWidth];
    find(step, rows);
    Steps::load_across(rows, channel, to);
  }

 private:
  __attribute__((always_inline)) void find(int64_t step, typename Cache<K>::Row (&rows)[Steps::kWidth]) const {
    for (int i = 0; i < Steps::kWidth; i++) rows[i] = values.row(step * Steps::kWidth + i);
  }
};

// The same as steps, in rows padded with zeros to whole vectors: worth its cost when many queries share them.
struct PackedValues {
  const float* data;
  int64_t stride;
  template <int VECTORS>
  __attribute__((always_inline)) void load(int64_t step, int64_t channel, Vec (&to)[VECTORS]) const {
    for (int v = 0; v < VECTORS; v++) to[v] = llmc::load(data + step * stride + channel + v * kLanes);
  }
};

template <class Steps, class T>
inline void pack_values(const CachedValues<Steps, T>& values, int64_t channels, int64_t stride, float* packed) {
  for (int64_t step = 0; step < steps_of<Steps>(kAttentionKeys); step++)
    for_vectors(channels, [&](int64_t c, auto lanes) {
      store(packed + step * stride + c, values.load(step, c, lanes));
    });
}

// Calls body(row, integral_constant<number of rows>) for blocks of four rows and the rest.
template <class Body>
inline void for_row_tile(int64_t rows, const Body& body) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) body(row, std::integral_constant<int, 4>{});
  if (rows - row == 3) body(row, std::integral_constant<int, 3>{});
  if (rows - row == 2) body(row, std::integral_constant<int, 2>{});
  if (rows - row == 1) body(row, std::integral_constant<int, 1>{});
}

// With four rows: 16 sums of 32 registers, or 8 of 16.
constexpr int kBlockVectors = kLanes == 16 ? 4 : 2;
constexpr int kBlockKeys = kBlockVectors * kLanes;

// scores[row][key] = q[row] · keys for kBlockKeys keys; rows of scores are kAttentionKeys apart. Fetches for
// kScore.
template <class Steps, int ROWS, class Fetch>
inline void score_block(const float* q, int64_t q_stride, const float* keys, int64_t steps, const Fetch& fetch,
                        float* scores) {
  Vec sums[ROWS][kBlockVectors] = {};
  for (int64_t step = 0; step < steps; step++) {
    Vec k[kBlockVectors];
    for (int v = 0; v < kBlockVectors; v++) k[v] = load(keys + step * kAttentionKeys + v * kLanes);
    fetch.step(FetchStage::kScore, step);
    for (int r = 0; r < ROWS; r++) {
      typename Steps::Step x;
      std::memcpy(&x, q + r * q_stride + step, sizeof x);
      for (int v = 0; v < kBlockVectors; v++) sums[r][v] = Steps::multiply_add(x, k[v], sums[r][v]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < kBlockVectors; v++) store(scores + r * kAttentionKeys + v * kLanes, sums[r][v]);
}

// sums[row] = sums[row]·decay[row] + probabilities[row] · values, over steps first to last, for VECTORS vectors from
// `channel` on; rows of sums are `stride` apart. Fetches for kValues.
template <class Steps, int ROWS, int VECTORS, class Values, class Fetch>
inline void value_block(const float* probabilities, int64_t first, int64_t last, const Values& values, int64_t channel,
                        const Fetch& fetch, const float* decay, float* to, int64_t stride) {
  constexpr int64_t kLineChannels = 16 * Steps::kWidth;
  Vec sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) sums[r][v] = load(to + r * stride + channel + v * kLanes) * decay[r];
  for (int64_t step = first; step < last; step++) {
    Vec x[VECTORS];
    values.load(step, channel, x);
    fetch.step(FetchStage::kValues, step, channel / kLineChannels);
    for (int r = 0; r < ROWS; r++) {
      typename Steps::Step p;
      std::memcpy(&p, probabilities + r * kAttentionKeys + step, sizeof p);
      for (int v = 0; v < VECTORS; v++) sums[r][v] = Steps::multiply_add(p, x[v], sums[r][v]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) store(to + r * stride + channel + v * kLanes, sums[r][v]);
}

// The same over keys first to last and for all `stride` channels, a multiple of kLanes.
template <class Steps, int ROWS, class Values, class Fetch>
inline void add_values(const float* probabilities, int64_t first, int64_t last, const Values& values,
                       const Fetch& fetch, const float* decay, float* to, int64_t stride) {
  const int64_t begin = first / Steps::kWidth, end = steps_of<Steps>(last);
  int64_t c = 0;
  for (; c + kBlockVectors * kLanes <= stride; c += kBlockVectors * kLanes)
    value_block<Steps, ROWS, kBlockVectors>(probabilities, begin, end, values, c, fetch, decay, to, stride);
  for (; c < stride; c += kLanes)
    value_block<Steps, ROWS, 1>(probabilities, begin, end, values, c, fetch, decay, to, stride);
}

}  // namespace llmc
