// llmc::rms_norm, layer_norm and both with the residual sum before them: y = (x - mean) / deviation · weight + bias.
//
// A row is small enough to stay in the cache between the passes over it. Sources: Zhang and Sennrich 2019; Ba, Kiros
// and Hinton 2016.
#include <cmath>

#include "row.h"

namespace {

using llmc::Vec;

// sum = x + residual, rounded to the element type.
template <class T>
void add_row(const T* x, const T* residual, int64_t channels, T* sum) {
  llmc::for_vectors(channels, [&](int64_t c, auto lanes) {
    llmc::store(sum + c, llmc::load(x + c, lanes) + llmc::load(residual + c, lanes), lanes);
  });
}

template <class T>
float mean_of(const T* x, int64_t channels) {
  Vec sum = {};
  llmc::for_vectors(channels, [&](int64_t c, auto lanes) { sum += llmc::load(x + c, lanes); });
  return llmc::sum_of(sum) / static_cast<float>(channels);
}

template <class T>
float mean_square_of(const T* x, float mean, int64_t channels) {
  Vec sum = {};
  llmc::for_vectors(channels, [&](int64_t c, auto lanes) {
    const Vec centred = llmc::keep(llmc::load(x + c, lanes) - mean, lanes);
    sum = llmc::fma(centred, centred, sum);
  });
  return llmc::sum_of(sum) / static_cast<float>(channels);
}

template <bool CENTRED, class T>
void norm_row(const T* x, const float* weight, const float* bias, float eps, int64_t channels, T* y) {
  const float mean = CENTRED ? mean_of(x, channels) : 0.0f;
  const float inverse = 1.0f / std::sqrt(mean_square_of(x, mean, channels) + eps);
  llmc::for_vectors(channels, [&](int64_t c, auto lanes) {
    Vec value = (llmc::load(x + c, lanes) - mean) * inverse;
    if (weight != nullptr) value *= llmc::load(weight + c, lanes);
    if (bias != nullptr) value += llmc::load(bias + c, lanes);
    llmc::store(y + c, value, lanes);
  });
}

template <bool CENTRED, class T>
void norm(LlmcPool* pool, const LlmcNorm& a) {
  const float* bias = CENTRED ? a.bias : nullptr;
  llmc::for_rows(pool, a.tokens, a.groups * a.channels, [&](int64_t token) {
    const T* x = llmc::row_of<const T>(a.x, token);
    if (a.residual.data != nullptr) {
      T* sum = llmc::row_of<T>(a.sum, token);
      add_row(x, llmc::row_of<const T>(a.residual, token), a.channels, sum);
      x = sum;
    }
    T* y = llmc::row_of<T>(a.y, token);
    for (int64_t c = 0; c < a.groups * a.channels; c += a.channels)
      norm_row<CENTRED>(x + c, a.weight, bias, a.eps, a.channels, y + c);
  });
}

}  // namespace

void llmc_rms_norm_f32(LlmcPool* pool, const LlmcNorm* arguments) { norm<false, float>(pool, *arguments); }
void llmc_rms_norm_bf16(LlmcPool* pool, const LlmcNorm* arguments) { norm<false, llmc::bf16>(pool, *arguments); }
void llmc_layer_norm_f32(LlmcPool* pool, const LlmcNorm* arguments) { norm<true, float>(pool, *arguments); }
void llmc_layer_norm_bf16(LlmcPool* pool, const LlmcNorm* arguments) { norm<true, llmc::bf16>(pool, *arguments); }
