// llmc::causal_conv_with_state: y[t, c] = bias[c] + Σ_j weight[j, c]·x[t - width + 1 + j, c].
#include "states.h"

// state: [slots, width - 1, channels], the rows of x before a request's first one of the step.
typedef struct {
  int64_t requests, channels, width;
  LlmcRows x, y;
  const float* weight;  // [width, channels]
  const float* bias;
  float* state;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* state_slots;
} LlmcCausalConv;

namespace {

constexpr int64_t kWidest = 32;  // WIDEST_CONV of llmc/codegen/cpp/state_kernels.py

template <class T, class Lanes>
void convolve(const LlmcCausalConv& a, const llmc::Carried& request, int64_t c, Lanes lanes) {
  const int64_t before = a.width - 1;
  llmc::Vec taps[kWidest], rows[kWidest];
  for (int64_t j = 0; j < a.width; j++) taps[j] = llmc::load(a.weight + j * a.channels + c, lanes);
  for (int64_t j = 0; j < before; j++)
    rows[j] = request.has_state ? llmc::load(request.state + j * a.channels + c, lanes) : llmc::Vec{};
  const llmc::Vec bias = a.bias == nullptr ? llmc::Vec{} : llmc::load(a.bias + c, lanes);
  for (int64_t token = request.first; token < request.end; token++) {
    rows[before] = llmc::load(llmc::row_of<const T>(a.x, token) + c, lanes);
    llmc::Vec sum = bias;
    for (int64_t j = 0; j < a.width; j++) sum = llmc::fma(taps[j], rows[j], sum);
    llmc::store(llmc::row_of<T>(a.y, token) + c, sum, lanes);
    for (int64_t j = 0; j < before; j++) rows[j] = rows[j + 1];
  }
  for (int64_t j = 0; j < before; j++) llmc::store(request.state + j * a.channels + c, rows[j], lanes);
}

template <class T>
void causal_conv(LlmcPool* pool, const LlmcCausalConv& a) {
  llmc::for_columns(pool, a, (a.width - 1) * a.channels, a.width * llmc::kLanes,
                    [&](const auto& request, int64_t c, auto lanes) { convolve<T>(a, request, c, lanes); });
}

}  // namespace

LLMC_KERNELS(LlmcCausalConv, causal_conv, causal_conv)
