// The two matrix products inside attention over caches of codes: they multiply the codes themselves, and scale the sums
// once for each group of channels.
//
//   score(key)     = Σ_groups scale(key, group) · (q · codes(key))_group + minimum(key, group) · Σ_group q
//   value(channel) = Σ_keys (p(key) · scale(key, group)) · code(key, channel) + Σ_keys p(key) · minimum(key, group)
//
// Codes are exact in bf16, so that only p · scale is rounded where products take bf16.
#pragma once
#include "pack_keys.h"

namespace llmc {

// The scales times a factor, then the minima, of kAttentionKeys rows: to[group][key], `groups` being all of a row.
template <class Format>
inline void gather_scales(const CachedRows<Format>& rows, float factor, float* to) {
  const auto& cache = rows.cache;
  for (int64_t key = 0; key < kAttentionKeys; key += kLanes) {
    const uint8_t* first = rows.row(key).scales;
    const bool in_order = rows.in_order[key / kLanes];  // then a group's scales follow each other
    for (int64_t number = 0; number < cache.numbers(); number++) {
      const int64_t at = number * cache.block_size * 2;
      uint16_t halves[kLanes];
      if (!in_order)
        for (int i = 0; i < kLanes; i++) std::memcpy(halves + i, rows.row(key + i).scales + at, sizeof halves[i]);
      VecHalves found;
      std::memcpy(&found, in_order ? static_cast<const void*>(first + at) : halves, sizeof found);
      store(to + number * kAttentionKeys + key, number < cache.groups ? widen(found) * factor : widen(found));
    }
  }
}

// ---- scores ----------------------------------------------------------------------------------------------------
// Runs of steps whose sums are multiplied by `scales`; null: nothing multiplies them.
struct StepRuns {
  int64_t count, steps;  // of each
  const float* scales;   // [count, kAttentionKeys]
  const float* minima;   // the same, or null
};

// How the keys of a cache are multiplied.
template <class Steps, class Format>
inline StepRuns step_runs(const CacheOfCodes<Format>& cache, const float* scales) {
  if (!cache.has_quads()) return {1, steps_of<Steps>(cache.channels), nullptr, nullptr};
  const float* minima = Format::kNibbles ? scales + cache.groups * kAttentionKeys : nullptr;
  return {cache.groups, cache.width / Steps::kWidth, scales, minima};
}

// The channels of a query in the order of quads, and what they add up to in each group.
template <class Steps, class Format, class T>
inline void pack_query(const CacheOfCodes<Format>& cache, const T* q, float* packed, float* sums) {
  if (!cache.has_quads()) return pack_query<Steps>(q, cache.channels, packed);
  for (int64_t group = 0; group < cache.groups; group++) {
    float sum = 0.0f;
    for (int64_t channel = group * cache.width; channel < (group + 1) * cache.width; channel++) {
      Steps::store_channel(packed, channel, q[channel]);
      sum += to_float(q[channel]);
    }
    sums[group] = sum;
  }
}

// Calls emit(index, words) for the words of kLanes rows: row(i) points to those of row i.
template <class Row, class Emit>
inline void for_words(const Row& row, int64_t bytes, const Emit& emit) {
  int64_t byte = 0;
  for (; bytes - byte > (kLanes == 16 ? 32 : 0); byte += kLanes * 4) {
    Vec square[kLanes];  // no numbers: only moved
    for (int i = 0; i < kLanes; i++) square[i] = from_bits(load_words(row(i) + byte, bytes - byte));
    transpose(square);
    const int64_t count = std::min<int64_t>(kLanes, (bytes - byte) / 4);
    for (int64_t i = 0; i < count; i++) emit(byte / 4 + i, bits_of(square[i]));
  }
#if defined(__AVX512F__)
  if (byte >= bytes) return;
  const int64_t count = (bytes - byte) / 4;
  const auto there = static_cast<__mmask8>((1u << count) - 1u);
  Vec rows[kLanes / 2];
  for (int i = 0; i < kLanes / 2; i++) {
    const __m256i low = _mm256_maskz_loadu_epi32(there, row(low_row_of(i)) + byte);
    const __m256i high = _mm256_maskz_loadu_epi32(there, row(low_row_of(i) + 4) + byte);
    rows[i] = reinterpret_cast<Vec>(_mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(low), high, 1));
  }
  transpose_halves(rows);
  for (int64_t i = 0; i < count; i++) emit(byte / 4 + i, bits_of(rows[i]));
#endif
}

// packed[step][key] and their scales. Fetches for kPack.
template <class Steps, class Format, class Fetch>
inline void pack_codes(const CachedRows<Format>& keys, const Fetch& fetch, float* packed, float* scales) {
  const int64_t bytes = keys.cache.row_bytes();
  gather_scales(keys, Format::kQuadFactor, scales);
  for (int64_t key = 0; key < kAttentionKeys; key += kLanes) {
    const auto emit = [&](int64_t quad, VecBits words) {
      float* to = packed + quad * (4 / Steps::kWidth) * kAttentionKeys + key;
      Steps::template for_quads<Format>(words, [&](int64_t half, int64_t step, Vec x) {
        store(to + (half * bytes / Steps::kWidth + step) * kAttentionKeys, x);
      });
    };
    const auto row = [&](int64_t i) { return keys.row(key + i).codes; };
    for_words(row, bytes, emit);
    for (int64_t next = key / 4; next < (key + kLanes) / 4; next++) fetch.rows(FetchStage::kPack, next);
    for (int64_t next = key; next < key + kLanes; next += kFetchScales) fetch.scales(next);
  }
}

// Computes scores[row][key] for kBlockKeys keys. `keys` and the runs' scales begin `key` places before the first of
// them. q_sums: [row][group], with stride `sums_stride`. Fetches for kScore.
template <class Steps, int ROWS, class Fetch>
inline void score_codes(const float* q, int64_t q_stride, const float* q_sums, int64_t sums_stride, const float* keys,
                        const StepRuns (&parts)[2], int64_t key, const Fetch& fetch, float* scores) {
  int64_t step = 0, group = 0;
  for (const StepRuns& part : parts) {
    for (int64_t run = 0; run < part.count; run++) {
      Vec dots[ROWS][kBlockVectors] = {};
      const bool first = step == 0;
      for (const int64_t end = step + part.steps; step < end; step++) {
        Vec k[kBlockVectors];
        for (int v = 0; v < kBlockVectors; v++) k[v] = load(keys + step * kAttentionKeys + key + v * kLanes);
        fetch.step(FetchStage::kScore, step);
        for (int r = 0; r < ROWS; r++) {
          typename Steps::Step x;
          std::memcpy(&x, q + r * q_stride + step, sizeof x);
          for (int v = 0; v < kBlockVectors; v++) dots[r][v] = Steps::multiply_add(x, k[v], dots[r][v]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < kBlockVectors; v++) {
          float* score = scores + r * kAttentionKeys + key + v * kLanes;
          const int64_t at = run * kAttentionKeys + key + v * kLanes;
          const Vec before = first ? Vec{} : load(score);
          Vec sum = part.scales == nullptr ? before + dots[r][v] : fma(dots[r][v], load(part.scales + at), before);
          if (part.minima != nullptr)
            sum = fma(broadcast(q_sums[r * sums_stride + group]), load(part.minima + at), sum);
          store(score, sum);
        }
      group += part.scales == nullptr ? 0 : 1;
    }
  }
}

// ---- values ----------------------------------------------------------------------------------------------------
// Probabilities of up to four rows times the scales of each group of channels, as steps, and what minima add.
struct ScaledProbabilities {
  static constexpr int64_t kRows = 4;
  float* steps;  // [groups, kRows, kAttentionKeys]
  float* added;  // [groups, kRows]

  static int64_t floats(int64_t groups) { return groups * kRows * (kAttentionKeys + 1); }
  ScaledProbabilities(float* memory, int64_t groups)
      : steps(memory), added(memory + groups * kRows * kAttentionKeys) {}
};

// scales: as of gather_scales.
template <class Steps, int ROWS, class Format>
inline void scale_probabilities(const CacheOfCodes<Format>& cache, const float* scales, const float* probabilities,
                                const ScaledProbabilities& to) {
  const float* minima = scales + cache.groups * kAttentionKeys;
  for (int64_t group = 0; group < cache.groups; group++)
    for (int r = 0; r < ROWS; r++) {
      Vec added = {};
      for (int key = 0; key < kAttentionKeys; key += kLanes) {
        const Vec p = load(probabilities + r * kAttentionKeys + key);
        const int64_t at = group * kAttentionKeys + key;
        float* row = to.steps + (group * ScaledProbabilities::kRows + r) * kAttentionKeys;
        Steps::store_steps(row, key, p * load(scales + at));
        if constexpr (Format::kNibbles) added = fma(p, load(minima + at), added);
      }
      to.added[group * ScaledProbabilities::kRows + r] = Format::kNibbles ? sum_of(added) : 0.0f;
    }
}

// Codes of values in the order of a row's bytes: where a byte has two, a vector of the low halves, then one of the high.
template <class Steps, class Format>
struct CodesOfValues {
  static constexpr int kHalves = Format::kNibbles ? 2 : 1;
  CachedRows<Format> values;

  // VECTORS vectors from the one that `channel` is the first of, in that order.
  template <int VECTORS>
  __attribute__((always_inline)) void load(int64_t step, int64_t channel, Vec (&to)[VECTORS]) const {
    static_assert(VECTORS % kHalves == 0, "both halves of a byte");
    const uint8_t* rows[Steps::kWidth];
    for (int i = 0; i < Steps::kWidth; i++) rows[i] = values.row(step * Steps::kWidth + i).codes + channel / kHalves;
    for (int v = 0; v < VECTORS; v += kHalves)
      Steps::template load_numbers<Format>(rows, v / kHalves * kLanes, to + v);
  }
};

template <class Steps, class Format>
inline void pack_codes_of_values(const CodesOfValues<Steps, Format>& values, int64_t channels, float* packed) {
  constexpr int kVectors = CodesOfValues<Steps, Format>::kHalves;
  for (int64_t step = 0; step < steps_of<Steps>(kAttentionKeys); step++)
    for (int64_t c = 0; c < channels; c += kVectors * kLanes) {
      Vec x[kVectors];
      values.load(step, c, x);
      for (int v = 0; v < kVectors; v++) store(packed + step * channels + c + v * kLanes, x[v]);
    }
}

// value_block for VECTORS vectors of codes from `channel` on, in their order. Fetches for kValues.
template <class Steps, int ROWS, int VECTORS, class Values, class Format, class Fetch>
inline void value_code_block(const CacheOfCodes<Format>& cache, const ScaledProbabilities& probabilities, int64_t first,
                             int64_t last, const Values& values, int64_t channel, const Fetch& fetch,
                             const float* decay, float* to, int64_t stride) {
  constexpr int64_t kLineChannels = 16 * Steps::kWidth, kGroup = ScaledProbabilities::kRows;
  const float* factors[VECTORS];
  Vec sums[ROWS][VECTORS];
  for (int v = 0; v < VECTORS; v++) {
    const int64_t group = cache.group_of(cache.channel_of(channel + v * kLanes));
    factors[v] = probabilities.steps + group * kGroup * kAttentionKeys;
    for (int r = 0; r < ROWS; r++)
      sums[r][v] = fma(load(to + r * stride + channel + v * kLanes), broadcast(decay[r]),
                       broadcast(probabilities.added[group * kGroup + r]));
  }
  for (int64_t step = first; step < last; step++) {
    Vec x[VECTORS];
    values.load(step, channel, x);
    fetch.step(FetchStage::kValues, step, channel / kLineChannels);
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) {
        typename Steps::Step p;
        std::memcpy(&p, factors[v] + r * kAttentionKeys + step, sizeof p);
        sums[r][v] = Steps::multiply_add(p, x[v], sums[r][v]);
      }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) store(to + r * stride + channel + v * kLanes, sums[r][v]);
}

// The same over keys first to last and for all `stride` channels.
template <class Steps, int ROWS, class Values, class Format, class Fetch>
inline void add_coded_values(const CacheOfCodes<Format>& cache, const ScaledProbabilities& probabilities, int64_t first,
                             int64_t last, const Values& values, const Fetch& fetch, const float* decay,
                             float* to, int64_t stride) {
  constexpr int kFew = Format::kNibbles ? 2 : 1;
  const int64_t begin = first / Steps::kWidth, end = steps_of<Steps>(last);
  int64_t c = 0;
  for (; c + kBlockVectors * kLanes <= stride; c += kBlockVectors * kLanes)
    value_code_block<Steps, ROWS, kBlockVectors>(cache, probabilities, begin, end, values, c, fetch, decay, to, stride);
  for (; c < stride; c += kFew * kLanes)
    value_code_block<Steps, ROWS, kFew>(cache, probabilities, begin, end, values, c, fetch, decay, to, stride);
}

}  // namespace llmc
