// Softmax taken piece by piece: what is kept for rows that have seen only some of their keys, and how pieces join.
//
// Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
#pragma once
#include <limits>

#include "activation.h"
#include "pack_keys.h"

namespace llmc {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// The softmax state of rows over some keys: the greatest score m, the sum of e^(score - m), and the sum of
// e^(score - m)·value. A row that has seen no key has m = -inf and zero sums.
struct SoftmaxPart {
  float* maximum;  // [rows]
  float* sum;      // [rows]
  float* values;   // [rows, stride]
  int64_t stride;

  static int64_t floats(int64_t rows, int64_t stride) { return rows * (stride + 2); }
  SoftmaxPart(float* memory, int64_t rows, int64_t stride)
      : maximum(memory + rows * stride), sum(maximum + rows), values(memory), stride(stride) {}

  void clear(int64_t rows) const {
    for (int64_t i = 0; i < rows * stride; i++) values[i] = 0.0f;
    for (int64_t i = 0; i < rows; i++) maximum[i] = kMinusInfinity;
    for (int64_t i = 0; i < rows; i++) sum[i] = 0.0f;
  }
};

// The value to subtract before exp. It is 0 for a row that has seen no key, so that scores of -inf stay -inf.
inline float softmax_origin(float maximum) { return maximum == kMinusInfinity ? 0.0f : maximum; }

inline float greater(float a, float b) { return a > b ? a : b; }

inline float exp_of(float x) { return exp(broadcast(x))[0]; }

struct ScoreScale {
  float scale;
  float softcap;        // 0: none
  const float* slopes;  // of each row, what a key farther back loses; null: nothing
  const float* const* bias;  // of each row, what the keys 0, 1, … extent - 1 places back get; null: nothing
  int64_t extent;
  const uint64_t* chosen;  // of each row, bit i: it sees the tile's key i; null: it sees all that its place allows
  int nearer;              // keys between the last that a row sees and its own, its own included; 0: it sees its own

  // Whether scores are nothing but multiplied, and so in the same order before.
  bool is_factor() const { return softcap == 0.0f && slopes == nullptr && bias == nullptr && scale > 0.0f; }
};

// Positions [first, last).
struct Keys {
  int64_t first, last;
};

// index + 0, 1, …
inline VecInt counted(int index) {
  static constexpr int32_t kCount[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  VecInt count;
  std::memcpy(&count, kCount, sizeof count);
  return count + index;
}

// Lanes whose index from `index` on is not one of `seen` become -inf.
inline Vec masked(Vec x, int index, Keys seen) {
  const VecInt key = counted(index);
  const VecInt visible = (key >= static_cast<int32_t>(seen.first)) & (key < static_cast<int32_t>(seen.last));
  return visible ? x : broadcast(kMinusInfinity);
}

static_assert(kAttentionKeys == 64, "a word has a bit for each key of a tile");

// Lanes whose key is not among those chosen become -inf.
inline Vec masked_by(Vec x, int index, uint64_t chosen) {
  float seen[kLanes];
  store(seen, x);
  for (int lane = 0; lane < kLanes; lane++)
    if ((chosen >> (index + lane) & 1) == 0) seen[lane] = kMinusInfinity;
  return load(seen);
}

// The bias of the keys from `index` on, for a row whose own key is `own`.
inline Vec bias_of(const float* bias, int64_t extent, int64_t own, int64_t index) {
  float added[kLanes];
  for (int64_t lane = 0; lane < kLanes; lane++) {
    const int64_t back = own - index - lane;
    added[lane] = back >= 0 && back < extent ? bias[back] : 0.0f;
  }
  return load(added);
}

// Scales, caps, biases and masks one row's scores of a tile and returns the greatest. Where only a positive factor is
// needed, the scores stay as they are, and the factor is left for later. A row's own key is `nearer` after the last seen.
inline float prepare_scores(const ScoreScale& by, bool scaled_later, int row, Keys seen, float* scores) {
  Vec greatest = broadcast(kMinusInfinity);
  const bool all = seen.first <= 0 && seen.last >= kAttentionKeys && by.chosen == nullptr;
  for (int i = 0; i < kAttentionKeys; i += kLanes) {
    Vec x = load(scores + i);
    if (!scaled_later) {
      x *= by.scale;
      if (by.softcap != 0.0f) x = by.softcap * tanh(x / by.softcap);
      if (by.slopes != nullptr) {
        const VecInt back = counted(i - static_cast<int>(seen.last - 1) - by.nearer);
        x = fma(__builtin_convertvector(back, Vec), broadcast(by.slopes[row]), x);
      }
      if (by.bias != nullptr) x += bias_of(by.bias[row], by.extent, seen.last - 1 + by.nearer, i);
    }
    if (!all) x = masked(x, i, seen);
    if (by.chosen != nullptr) x = masked_by(x, i, by.chosen[row]);
    if (!all || !scaled_later) store(scores + i, x);
    greatest = llmc::maximum(greatest, x);
  }
  return maximum_of(greatest);
}

// Turns a tile of scores into steps of e^(score - m), and updates m and sum. seen: the keys that each row sees. decay:
// the factors by which earlier sums must be scaled. Fetches for kSoftmax.
template <class Steps, int ROWS, class Fetch>
inline void add_scores(const ScoreScale& by, const Keys (&seen)[ROWS], const Fetch& fetch, float* scores,
                       float* maximum, float* sum, float (&decay)[ROWS]) {
  const bool scaled_later = by.is_factor();
  const float scale = scaled_later ? by.scale : 1.0f;
  float origin[ROWS];
  for (int r = 0; r < ROWS; r++) {
    const float before = maximum[r];
    maximum[r] = greater(before, scale * prepare_scores(by, scaled_later, r, seen[r], scores + r * kAttentionKeys));
    origin[r] = softmax_origin(maximum[r]);
    decay[r] = before == maximum[r] ? 1.0f : exp_of(before - origin[r]);
  }
  // Interleave the rows: sums of single rows would be chains of dependent additions.
  Vec total[ROWS] = {};
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++) {
    float* row = scores + r * kAttentionKeys;
#pragma GCC unroll 4
    for (int i = 0; i < kAttentionKeys; i += kLanes) {
      total[r] += Steps::store_steps(row, i, exp(fma(load(row + i), broadcast(scale), broadcast(-origin[r]))));
      const int64_t done = r * kAttentionKeys + i;
      for (int64_t key = done / (4 * ROWS); key < (done + kLanes) / (4 * ROWS); key++)
        fetch.rows(FetchStage::kSoftmax, key);
    }
  }
  for (int r = 0; r < ROWS; r++) sum[r] = sum[r] * decay[r] + sum_of(total[r]);
}

// to becomes what it would be had it seen the keys of `part` too.
inline void join(const SoftmaxPart& to, const SoftmaxPart& part, int64_t rows) {
  for (int64_t row = 0; row < rows; row++) {
    const float maximum = greater(to.maximum[row], part.maximum[row]);
    const float origin = softmax_origin(maximum);
    const float a = exp_of(to.maximum[row] - origin), b = exp_of(part.maximum[row] - origin);
    for (int64_t c = row * to.stride; c < (row + 1) * to.stride; c += kLanes)
      store(to.values + c, fma(load(part.values + c), broadcast(b), load(to.values + c) * a));
    to.sum[row] = to.sum[row] * a + part.sum[row] * b;
    to.maximum[row] = maximum;
  }
}

// The factor for a row's values after all keys. sink: a score that takes probability and adds no value, or null.
inline float softmax_factor(float maximum, float sum, const float* sink) {
  if (sink == nullptr) return 1.0f / sum;
  const float origin = greater(maximum, *sink);
  const float decay = exp_of(maximum - origin);
  return decay / (sum * decay + exp_of(*sink - origin));
}

}  // namespace llmc
