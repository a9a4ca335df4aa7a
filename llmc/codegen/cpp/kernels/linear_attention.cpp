// llmc::linear_attention_with_state: S ← diag(exp(decay))·S, then S ← S + kᵀ·v or, with beta, S + kᵀ·(beta·(v - k·S));
// y = q·S. Columns of S do not know of each other: a thread takes some of one head's through all tokens.
#include "activation.h"
#include "states.h"

// state: [slots, heads, key_dim, value_dim]; decay has one number a head, or key_dim of them; all is fp32.
typedef struct {
  int64_t requests, groups, heads, key_dim, value_dim, decays;
  LlmcRows q, k, v, decay, beta, y;
  float* state;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* state_slots;
} LlmcLinearAttention;

namespace {

constexpr int64_t kWidestKey = 1024;  // WIDEST_KEY of llmc/codegen/cpp/state_kernels.py

// exp of one head's decays at a token, one for each channel of a key.
void kept_shares(const LlmcLinearAttention& a, int64_t token, int64_t head, float* kept) {
  const float* decay = llmc::row_of<const float>(a.decay, token) + head * a.decays;
  if (a.decays == 1) {
    const llmc::Vec share = llmc::exp(llmc::broadcast(*decay));
    llmc::for_vectors(a.key_dim, [&](int64_t i, auto lanes) { llmc::store(kept + i, share, lanes); });
  } else {
    llmc::for_vectors(a.key_dim, [&](int64_t i, auto lanes) {
      llmc::store(kept + i, llmc::exp(llmc::load(decay + i, lanes)), lanes);
    });
  }
}

template <class Lanes>
void attend(const LlmcLinearAttention& a, const llmc::Carried& request, int64_t head, int64_t column, Lanes lanes) {
  float kept[kWidestKey];
  float* state = request.state + head * a.key_dim * a.value_dim + column;
  if (!request.has_state)
    for (int64_t i = 0; i < a.key_dim; i++) llmc::store(state + i * a.value_dim, llmc::Vec{}, lanes);
  const int64_t group = head / (a.heads / a.groups) * a.key_dim;
  for (int64_t token = request.first; token < request.end; token++) {
    const float* q = llmc::row_of<const float>(a.q, token) + group;
    const float* k = llmc::row_of<const float>(a.k, token) + group;
    kept_shares(a, token, head, kept);
    llmc::Vec added = llmc::load(llmc::row_of<const float>(a.v, token) + head * a.value_dim + column, lanes);
    if (a.beta.data != nullptr) {
      llmc::Vec found = {};
      for (int64_t i = 0; i < a.key_dim; i++)
        found = llmc::fma(llmc::broadcast(k[i] * kept[i]), llmc::load(state + i * a.value_dim, lanes), found);
      added = (added - found) * llmc::row_of<const float>(a.beta, token)[head];
    }
    llmc::Vec sum = {};
    for (int64_t i = 0; i < a.key_dim; i++) {
      const llmc::Vec before = llmc::load(state + i * a.value_dim, lanes) * kept[i];
      const llmc::Vec after = llmc::fma(llmc::broadcast(k[i]), added, before);
      llmc::store(state + i * a.value_dim, after, lanes);
      sum = llmc::fma(llmc::broadcast(q[i]), after, sum);
    }
    llmc::store(llmc::row_of<float>(a.y, token) + head * a.value_dim + column, sum, lanes);
  }
}

void linear_attention(LlmcPool* pool, const LlmcLinearAttention& a) {
  const int64_t vectors = (a.value_dim + llmc::kLanes - 1) / llmc::kLanes;
  llmc::for_parts(pool, a, a.heads * a.key_dim * a.value_dim, a.heads * vectors, 2 * a.key_dim * llmc::kLanes,
                  [&](const llmc::Carried& request, int64_t part) {
                    const int64_t head = part / vectors, column = part % vectors * llmc::kLanes;
                    if (column + llmc::kLanes <= a.value_dim)
                      attend(a, request, head, column, llmc::AllLanes{});
                    else
                      attend(a, request, head, column, a.value_dim - column);
                  });
}

}  // namespace

LLMC_KERNEL(LlmcLinearAttention, linear_attention, linear_attention)
