// Norms of rows, with the residual sum before them: y = (x - mean) / deviation · weight + bias; CENTRED: mean is not 0.
//
// A row is small enough to stay in the cache between the passes over it.
#pragma once
#include <cmath>

#include "row.h"

// Norm of each group of `channels`: group g of token t starts at x.data[t * stride + g * channels] (groups > 1: per
// head). With residual: s = x + residual rounded to the element type, sum = s, y = norm(s).
// weight and bias fp32 or null. (llmc::rms_norm, layer_norm, add_rms_norm, add_layer_norm)
typedef struct {
  int64_t tokens, groups, channels;
  LlmcRows x;
  LlmcRows residual;  // null data: none
  const float* weight;
  const float* bias;  // layer_norm only
  float eps;
  LlmcRows y;
  LlmcRows sum;  // with residual only
} LlmcNorm;

namespace llmc {

// sum = x + residual, rounded to the element type.
template <class T>
void add_row(const T* x, const T* residual, int64_t channels, T* sum) {
  for_vectors(channels, [&](int64_t c, auto lanes) {
    store(sum + c, load(x + c, lanes) + load(residual + c, lanes), lanes);
  });
}

template <class T>
float mean_of(const T* x, int64_t channels) {
  Vec sum = {};
  for_vectors(channels, [&](int64_t c, auto lanes) { sum += load(x + c, lanes); });
  return sum_of(sum) / static_cast<float>(channels);
}

template <class T>
float mean_square_of(const T* x, float mean, int64_t channels) {
  Vec sum = {};
  for_vectors(channels, [&](int64_t c, auto lanes) {
    const Vec centred = keep(load(x + c, lanes) - mean, lanes);
    sum = fma(centred, centred, sum);
  });
  return sum_of(sum) / static_cast<float>(channels);
}

template <bool CENTRED, class T>
void norm_row(const T* x, const float* weight, const float* bias, float eps, int64_t channels, T* y) {
  const float mean = CENTRED ? mean_of(x, channels) : 0.0f;
  const float inverse = 1.0f / std::sqrt(mean_square_of(x, mean, channels) + eps);
  for_vectors(channels, [&](int64_t c, auto lanes) {
    Vec value = (load(x + c, lanes) - mean) * inverse;
    if (weight != nullptr) value *= load(weight + c, lanes);
    if (bias != nullptr) value += load(bias + c, lanes);
    store(y + c, value, lanes);
  });
}

template <bool CENTRED, class T>
void norm(LlmcPool* pool, const LlmcNorm& a) {
  const float* bias = CENTRED ? a.bias : nullptr;
  for_rows(pool, a.tokens, a.groups * a.channels, [&](int64_t token) {
    const T* x = row_of<const T>(a.x, token);
    if (a.residual.data != nullptr) {
      T* sum = row_of<T>(a.sum, token);
      add_row(x, row_of<const T>(a.residual, token), a.groups * a.channels, sum);
      x = sum;
    }
    T* y = row_of<T>(a.y, token);
    for (int64_t c = 0; c < a.groups * a.channels; c += a.channels)
      norm_row<CENTRED>(x + c, a.weight, bias, a.eps, a.channels, y + c);
  });
}

}  // namespace llmc
