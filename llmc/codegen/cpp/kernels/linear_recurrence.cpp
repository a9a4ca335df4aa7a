// llmc::linear_recurrence_with_state: y[t, c] = S[c], then S[c] ← decay[t, c]·S[c] + x[t, c], or, tropical,
// S[c] ← max(decay[t, c] + S[c], x[t, c]).
#include "states.h"

// state: [slots, channels]; all is fp32.
typedef struct {
  int64_t requests, channels, tropical;
  LlmcRows x, decay, y;
  float initial;
  float* state;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* state_slots;
} LlmcLinearRecurrence;

namespace {

template <class Lanes>
void recur(const LlmcLinearRecurrence& a, const llmc::Carried& request, int64_t c, Lanes lanes) {
  const llmc::Vec initial = llmc::broadcast(a.initial);
  llmc::Vec state = request.has_state ? llmc::load(request.state + c, lanes) : initial;
  for (int64_t token = request.first; token < request.end; token++) {
    llmc::store(llmc::row_of<float>(a.y, token) + c, state, lanes);
    const llmc::Vec x = llmc::load(llmc::row_of<const float>(a.x, token) + c, lanes);
    const llmc::Vec decay = llmc::load(llmc::row_of<const float>(a.decay, token) + c, lanes);
    state = a.tropical ? llmc::maximum(decay + state, x) : llmc::fma(decay, state, x);
  }
  llmc::store(request.state + c, state, lanes);
}

void linear_recurrence(LlmcPool* pool, const LlmcLinearRecurrence& a) {
  llmc::for_columns(pool, a, a.channels, llmc::kLanes,
                    [&](const auto& request, int64_t c, auto lanes) { recur(a, request, c, lanes); });
}

}  // namespace

LLMC_KERNEL(LlmcLinearRecurrence, linear_recurrence, linear_recurrence)
