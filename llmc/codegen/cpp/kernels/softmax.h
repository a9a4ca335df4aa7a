// Softmax taken piece by piece: what is kept for rows that have seen only some of their keys, and how pieces join.
//
// Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
#pragma once
#include <limits>

#include "activation.h"
#include "attention_products.h"

namespace llmc {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Of rows over some keys: the greatest score m, the sum of e^(score - m), and that of e^(score - m)·value. A row that
// has seen no key has m = -inf and zeros.
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

// What to subtract before exp, so that -inf stays -inf: a row that has seen nothing has no greatest score.
inline float softmax_origin(float maximum) { return maximum == kMinusInfinity ? 0.0f : maximum; }

inline float greater(float a, float b) { return a > b ? a : b; }

inline float exp_of(float x) { return exp(broadcast(x))[0]; }

struct ScoreScale {
  float scale;
  float softcap;  // 0: none
};

inline Vec scaled(const ScoreScale& by, Vec score) {
  const Vec x = score * by.scale;
  return by.softcap == 0.0f ? x : by.softcap * tanh(x / by.softcap);
}

// Lanes whose index from `index` on lies in [first, last) keep x; the others become -inf.
inline Vec masked(Vec x, int index, int64_t first, int64_t last) {
  VecInt key = {};
  for (int i = 0; i < kLanes; i++) key[i] = index + i;
  const VecInt visible = (key >= static_cast<int32_t>(first)) & (key < static_cast<int32_t>(last));
  return visible ? x : broadcast(kMinusInfinity);
}

// Turns a tile of one row's scores, of which it sees [first, last), into e^(score - m), and brings m and sum up to
// date. Returns the factor that what was summed before must shrink by.
inline float add_scores(const ScoreScale& scale, int64_t first, int64_t last, float* scores, float& maximum,
                        float& sum) {
  const bool all = first <= 0 && last >= kAttentionKeys;
  Vec greatest = broadcast(kMinusInfinity);
  for (int i = 0; i < kAttentionKeys; i += kLanes) {
    Vec x = scaled(scale, load(scores + i));
    if (!all) x = masked(x, i, first, last);
    greatest = llmc::maximum(greatest, x);
    store(scores + i, x);
  }
  const float before = maximum;
  maximum = greater(before, maximum_of(greatest));
  const float origin = softmax_origin(maximum);
  Vec total = {};
  for (int i = 0; i < kAttentionKeys; i += kLanes) {
    const Vec p = exp(load(scores + i) - origin);
    store(scores + i, p);
    total += p;
  }
  const float decay = before == maximum ? 1.0f : exp_of(before - origin);
  sum = sum * decay + sum_of(total);
  return decay;
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

// What a row's values must be multiplied by once all keys are seen. sink: a score that takes probability and adds no
// value, or null.
inline float softmax_factor(float maximum, float sum, const float* sink) {
  if (sink == nullptr) return 1.0f / sum;
  const float origin = greater(maximum, *sink);
  const float decay = exp_of(maximum - origin);
  return decay / (sum * decay + exp_of(*sink - origin));
}

}  // namespace llmc
