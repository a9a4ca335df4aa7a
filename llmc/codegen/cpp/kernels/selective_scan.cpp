// llmc::selective_scan_with_state: S[c, n] ← exp(dt·A[c, n])·S[c, n] + dt·x·B[n]; y = Σ_n S[c, n]·C[n].
#include "activation.h"
#include "states.h"

// A: [channels, n]; state: [slots, channels, n]; all is fp32.
typedef struct {
  int64_t requests, channels, n;
  LlmcRows x, dt, B, C, y;
  const float* A;
  float* state;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* state_slots;
} LlmcSelectiveScan;

namespace {

void scan_channel(const LlmcSelectiveScan& a, const llmc::Carried& request, int64_t channel) {
  const float* rates = a.A + channel * a.n;
  float* state = request.state + channel * a.n;
  if (!request.has_state)
    for (int64_t i = 0; i < a.n; i++) state[i] = 0.0f;
  for (int64_t token = request.first; token < request.end; token++) {
    const float dt = llmc::row_of<const float>(a.dt, token)[channel];
    const float added = dt * llmc::row_of<const float>(a.x, token)[channel];
    const float* B = llmc::row_of<const float>(a.B, token);
    const float* C = llmc::row_of<const float>(a.C, token);
    llmc::Vec sum = {};
    llmc::for_vectors(a.n, [&](int64_t i, auto lanes) {
      const llmc::Vec kept = llmc::exp(llmc::load(rates + i, lanes) * dt) * llmc::load(state + i, lanes);
      const llmc::Vec after = llmc::fma(llmc::broadcast(added), llmc::load(B + i, lanes), kept);
      llmc::store(state + i, after, lanes);
      sum = llmc::fma(after, llmc::load(C + i, lanes), sum);
    });
    llmc::row_of<float>(a.y, token)[channel] = llmc::sum_of(sum);
  }
}

void selective_scan(LlmcPool* pool, const LlmcSelectiveScan& a) {
  constexpr int64_t kWork = 4;  // an exp costs about as much as four light elements
  llmc::for_parts(pool, a, a.channels * a.n, a.channels, kWork * a.n,
                  [&](const llmc::Carried& request, int64_t channel) { scan_channel(a, request, channel); });
}

}  // namespace

LLMC_KERNEL(LlmcSelectiveScan, selective_scan, selective_scan)
