// Gumbel noise of the tokens of a row, and the search for the largest sum of noise and logit: llmc/ops/sampling.py.
//
// The noise of a token is -log of an exponential arrival time. The first of a group of 64 arrivals comes after 1/64 of
// an exponential time, and each token is equally likely to be the first. Because the exponential distribution has no
// memory, every other arrival comes an exponential time after the first. So one random number bounds the noise of 64
// tokens, and few groups need more. Random numbers: Philox 4x32 with ten rounds (Salmon, Moraes, Dror and Shaw 2011),
// keyed by a request's seed and its own counter.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "activation.h"
#include "vector.h"

namespace llmc {

constexpr int kNoiseGroup = 64;
constexpr int kNoiseRun = kNoiseGroup / 4;  // places of a group, each with a word for four tokens that lie so far apart
constexpr uint32_t kGroupPlaces = 1u << 30;  // where the places of the groups themselves begin
constexpr int kWinnerShift = 26;

struct NoiseKey {
  uint32_t seed;
  uint32_t counter;
};

// The upper and the lower half of a product of 32-bit numbers.
inline void multiply(VecBits a, uint32_t b, VecBits* upper, VecBits* lower) {
#if defined(__AVX512F__)
  const __m512i x = reinterpret_cast<__m512i>(a), factor = _mm512_set1_epi32(static_cast<int32_t>(b));
  constexpr __mmask8 kAll = 0xff;  // without a mask GCC's own header gives false warnings, as in transpose.h
  const __m512i even = _mm512_maskz_mul_epu32(kAll, x, factor);
  const __m512i odd = _mm512_maskz_mul_epu32(kAll, _mm512_maskz_srli_epi64(kAll, x, 32), factor);
  *upper = reinterpret_cast<VecBits>(_mm512_mask_mov_epi32(_mm512_maskz_srli_epi64(kAll, even, 32), 0xaaaa, odd));
  *lower = reinterpret_cast<VecBits>(_mm512_mask_mov_epi32(even, 0xaaaa, _mm512_maskz_slli_epi64(kAll, odd, 32)));
#elif defined(__AVX2__)
  const __m256i x = reinterpret_cast<__m256i>(a), factor = _mm256_set1_epi32(static_cast<int32_t>(b));
  const __m256i even = _mm256_mul_epu32(x, factor), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), factor);
  *upper = reinterpret_cast<VecBits>(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa));
  *lower = reinterpret_cast<VecBits>(_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa));
#else
  for (int lane = 0; lane < kLanes; lane++) (*upper)[lane] = static_cast<uint32_t>(uint64_t{a[lane]} * b >> 32);
  *lower = a * b;
#endif
}

// Four random words for each place.
inline void random_words(NoiseKey key, VecBits places, VecBits (&words)[4]) {
  words[0] = places;
  words[1] = words[2] = words[3] = VecBits{};
  for (int round = 0; round < 10; round++) {
    VecBits even_upper, even_lower, odd_upper, odd_lower;
    multiply(words[0], 0xD2511F53, &even_upper, &even_lower);
    multiply(words[2], 0xCD9E8D57, &odd_upper, &odd_lower);
    words[0] = odd_upper ^ words[1] ^ key.seed;
    words[1] = odd_lower;
    words[2] = even_upper ^ words[3] ^ key.counter;
    words[3] = even_lower;
    key.seed += 0x9E3779B9;
    key.counter += 0xBB67AE85;
  }
}

// In (0, 1): of 31 of a word's bits, half a unit above the least.
inline Vec uniform_of(VecBits bits) {
  const VecInt word = reinterpret_cast<VecInt>(bits);
  return __builtin_convertvector(word ^ (word >> 31), Vec) * 4.6566127342e-10f + 2.3283063671e-10f;
}

// -log(1 - u): exponentially distributed.
inline double waiting_time(float number) { return -std::log1p(-static_cast<double>(number)); }

// The token of the largest (logit - largest) / temperature + noise, the lowest one of equals. Tokens are counted from where
// the logits begin; noise is that of the ids, which begin at `first`.
class LargestSum {
 public:
  // The tokens that one call of offer_tile looks at.
  static constexpr int64_t kTile = int64_t{kNoiseGroup} * kLanes;

  LargestSum(const float* logits, float largest, float per_temperature, NoiseKey key, int64_t first = 0)
      : logits_(logits), largest_(largest), per_temperature_(per_temperature), key_(key), first_(first) {}

  int32_t token() const { return token_; }
  // -inf while nothing was offered that could win against what a row is known to have.
  double sum() const { return sum_; }

  // All tokens in [begin, end), at most a tile, which begin with a group; none of their logits is above `bound`.
  void offer_tile(int64_t begin, int64_t end, float bound) {
    const Groups groups = groups_of(places_from(kGroupPlaces + static_cast<uint32_t>((first_ + begin) / kNoiseGroup)));
    const VecInt may_win = groups.least <= broadcast(weight_of(bound) * scale_);
    const int64_t count = (end - begin + kNoiseGroup - 1) / kNoiseGroup;
    for (int64_t lane = 0; lane < count; lane++) {
      if (!may_win[lane]) continue;
      const int64_t first = begin + lane * kNoiseGroup;
      offer_group(first, std::min<int64_t>(end - first, kNoiseGroup), groups.number[lane], groups.winner[lane]);
    }
  }

  // `count` tokens with their weights e^((logit - largest) / temperature), in any order.
  void offer_tokens(const int32_t* tokens, const float* weights, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t lanes = std::min<int64_t>(kLanes, count - i);
      VecBits token = {};
      std::memcpy(&token, tokens + i, static_cast<size_t>(lanes) * 4);
      token += static_cast<uint32_t>(first_);
      const VecBits group = token / kNoiseGroup;
      const Groups groups = groups_of(group + kGroupPlaces);
      const VecInt may_win = groups.least <= load(weights + i, lanes) * scale_;
      if (!any(may_win)) continue;
      VecBits words[4];
      random_words(key_, group * kNoiseRun + token % kNoiseRun, words);
      for (int64_t lane = 0; lane < lanes; lane++) {
        if (!may_win[lane]) continue;
        const uint32_t place = token[lane] % kNoiseGroup;
        const float number = uniform_of(words[place / kNoiseRun])[lane];
        offer(tokens[i + lane], time_of(groups.number[lane], place == groups.winner[lane], number));
      }
    }
  }

 private:
  // least: what no time in the group is below.
  struct Groups {
    Vec number, least;
    VecBits winner;
  };

  Groups groups_of(VecBits places) const {
    VecBits words[4];
    random_words(key_, places, words);
    const Vec number = uniform_of(words[0]);
    return {number, number * (1.0f / kNoiseGroup), words[1] >> kWinnerShift};
  }

  static VecBits places_from(uint32_t first) {
    VecBits places;
    for (int lane = 0; lane < kLanes; lane++) places[lane] = first + static_cast<uint32_t>(lane);
    return places;
  }

  static bool any(VecInt lanes) { return maximum_of(__builtin_convertvector(lanes & 1, Vec)) > 0.0f; }

  static double time_of(float group_number, bool is_winner, float number) {
    const double first = waiting_time(group_number) / kNoiseGroup;
    return is_winner ? first : first + waiting_time(number);
  }

  float weight_of(float logit) const { return exp(broadcast((logit - largest_) * per_temperature_))[0]; }

  void offer_group(int64_t first, int64_t count, float group_number, uint32_t winner) {
    Vec weights[kNoiseGroup / kLanes], heaviest = {};
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t lanes = std::min<int64_t>(kLanes, count - i);
      weights[i / kLanes] = exp((load(logits_ + first + i, lanes) - largest_) * per_temperature_) * scale_;
      heaviest = maximum(heaviest, lanes == kLanes ? weights[i / kLanes] : broadcast(kAny));
    }
    const float least = group_number * (1.0f / kNoiseGroup);
    if (least > maximum_of(heaviest)) return;
    for (int64_t run = 0; run < kNoiseRun; run += kLanes) {
      VecBits words[4];
      random_words(key_, places_from(static_cast<uint32_t>((first_ + first) / 4 + run)), words);
      for (int64_t i = run; i < count; i += kNoiseRun) {
        const Vec numbers = uniform_of(words[i / kNoiseRun]);
        const VecInt may_win = numbers + least <= weights[i / kLanes];
        for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, count - i); lane++) {
          const bool is_winner = static_cast<uint32_t>(i + lane) == winner;
          if (is_winner || may_win[lane])
            offer(static_cast<int32_t>(first + i + lane), time_of(group_number, is_winner, numbers[lane]));
        }
      }
    }
  }

  void offer(int32_t token, double time) {
    const float scaled = (logits_[token] - largest_) * per_temperature_;
    const double sum = scaled - std::log(time);
    if (sum < sum_ || (sum == sum_ && token >= token_)) return;
    sum_ = sum;
    token_ = token;
    scale_ = static_cast<float>(1.001 * std::exp(-sum));
  }

  static constexpr float kAny = std::numeric_limits<float>::infinity();

  const float* logits_;
  float largest_;
  float per_temperature_;
  NoiseKey key_;
  int64_t first_;
  double sum_ = -static_cast<double>(kAny);
  int32_t token_ = 0;
  float scale_ = kAny;  // times this, a token's weight is the latest time that wins
};

}  // namespace llmc
