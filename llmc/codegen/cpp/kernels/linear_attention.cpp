// llmc::linear_attention_with_state: S ← diag(exp(decay))·S, then S ← S + kᵀ·v or, with beta, S + kᵀ·(beta·(v - k·S));
// y = q·S. Columns of S are independent: a thread takes some of one head's through all tokens.
#include <algorithm>

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
// Number of adjacent vectors of columns: kOnce for one token, which reads memory in order, and kAgain for several
// tokens, so that the columns stay in the level-1 cache.
constexpr int64_t kOnce = 4, kAgain = 2;
// Tokens that pass over a state at once.
constexpr int64_t kTokens = llmc::kLanes == 16 ? 4 : 2;

// Columns of one head's state, whose rows are `stride` apart, and which k and q the head reads.
struct Head {
  int64_t head, group, column;
  float* state;
  int64_t stride;
};

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

const float* of_head(const LlmcRows& rows, int64_t token, int64_t first) {
  return llmc::row_of<const float>(rows, token) + first;
}

// The tokens of one pass without the delta rule: none needs what another one found, so that a row of the state is read
// and written once for all of them.
template <int64_t kVectors, int64_t kCount, class Lanes>
void add(const LlmcLinearAttention& a, const Head& h, int64_t token, Lanes lanes) {
  const float *q[kCount], *k[kCount];
  float kept[kCount][kWidestKey];
  llmc::Vec added[kCount][kVectors], sum[kCount][kVectors] = {};
  for (int64_t t = 0; t < kCount; t++) {
    q[t] = of_head(a.q, token + t, h.group);
    k[t] = of_head(a.k, token + t, h.group);
    kept_shares(a, token + t, h.head, kept[t]);
    const float* v = of_head(a.v, token + t, h.head * a.value_dim + h.column);
    for (int64_t c = 0; c < kVectors; c++) added[t][c] = llmc::load(v + c * llmc::kLanes, lanes);
  }
  for (int64_t i = 0; i < a.key_dim; i++) {
    float* row = h.state + i * h.stride;
    for (int64_t c = 0; c < kVectors; c++) {
      llmc::Vec state = llmc::load(row + c * llmc::kLanes, lanes);
      for (int64_t t = 0; t < kCount; t++) {
        state = llmc::fma(llmc::broadcast(k[t][i]), added[t][c], state * kept[t][i]);
        sum[t][c] = llmc::fma(llmc::broadcast(q[t][i]), state, sum[t][c]);
      }
      llmc::store(row + c * llmc::kLanes, state, lanes);
    }
  }
  for (int64_t t = 0; t < kCount; t++) {
    float* y = llmc::row_of<float>(a.y, token + t) + h.head * a.value_dim + h.column;
    for (int64_t c = 0; c < kVectors; c++) llmc::store(y + c * llmc::kLanes, sum[t][c], lanes);
  }
}

// The value that the delta rule reads for a token's key from the decayed state.
template <int64_t kVectors>
struct Found {
  float kept[kWidestKey], key[kWidestKey];  // key: k times kept
  llmc::Vec sum[kVectors];

  void begin(const LlmcLinearAttention& a, const Head& h, int64_t token) {
    const float* k = of_head(a.k, token, h.group);
    kept_shares(a, token, h.head, kept);
    llmc::for_vectors(a.key_dim, [&](int64_t i, auto lanes) {
      llmc::store(key + i, llmc::load(k + i, lanes) * llmc::load(kept + i, lanes), lanes);
    });
    for (llmc::Vec& each : sum) each = llmc::Vec{};
  }
};

// A token of the delta rule; while its states are at hand, what the next one finds there is summed up.
template <int64_t kVectors, bool kHasNext, class Lanes>
void correct(const LlmcLinearAttention& a, const Head& h, int64_t token, const Found<kVectors>& found,
             Found<kVectors>& next, Lanes lanes) {
  const float *q = of_head(a.q, token, h.group), *k = of_head(a.k, token, h.group);
  const float* v = of_head(a.v, token, h.head * a.value_dim + h.column);
  const float beta = llmc::row_of<const float>(a.beta, token)[h.head];
  if constexpr (kHasNext) next.begin(a, h, token + 1);
  llmc::Vec added[kVectors], sum[kVectors] = {}, ahead[kVectors] = {};
  for (int64_t c = 0; c < kVectors; c++)
    added[c] = (llmc::load(v + c * llmc::kLanes, lanes) - found.sum[c]) * beta;
  for (int64_t i = 0; i < a.key_dim; i++) {
    float* row = h.state + i * h.stride;
    for (int64_t c = 0; c < kVectors; c++) {
      const llmc::Vec before = llmc::load(row + c * llmc::kLanes, lanes) * found.kept[i];
      const llmc::Vec after = llmc::fma(llmc::broadcast(k[i]), added[c], before);
      llmc::store(row + c * llmc::kLanes, after, lanes);
      sum[c] = llmc::fma(llmc::broadcast(q[i]), after, sum[c]);
      if constexpr (kHasNext) ahead[c] = llmc::fma(llmc::broadcast(next.key[i]), after, ahead[c]);
    }
  }
  float* y = llmc::row_of<float>(a.y, token) + h.head * a.value_dim + h.column;
  for (int64_t c = 0; c < kVectors; c++) {
    llmc::store(y + c * llmc::kLanes, sum[c], lanes);
    next.sum[c] = ahead[c];
  }
}

template <int64_t kVectors, class Lanes>
void correct_all(const LlmcLinearAttention& a, const llmc::Carried& request, const Head& h, Lanes lanes) {
  Found<kVectors> both[2];
  both[0].begin(a, h, request.first);
  for (int64_t i = 0; i < a.key_dim; i++)
    for (int64_t c = 0; c < kVectors; c++) {
      const llmc::Vec state = llmc::load(h.state + i * h.stride + c * llmc::kLanes, lanes);
      both[0].sum[c] = llmc::fma(llmc::broadcast(both[0].key[i]), state, both[0].sum[c]);
    }
  int64_t token = request.first, now = 0;
  for (; token + 1 < request.end; token++, now ^= 1)
    correct<kVectors, true>(a, h, token, both[now], both[now ^ 1], lanes);
  correct<kVectors, false>(a, h, token, both[now], both[now ^ 1], lanes);
}

template <int64_t kVectors, class Lanes>
void attend_all(const LlmcLinearAttention& a, const llmc::Carried& request, const Head& h, Lanes lanes) {
  if (a.beta.data != nullptr) return correct_all<kVectors>(a, request, h, lanes);
  int64_t token = request.first;
  for (; token + kTokens <= request.end; token += kTokens) add<kVectors, kTokens>(a, h, token, lanes);
  for (; token < request.end; token++) add<kVectors, 1>(a, h, token, lanes);
}

// Passes all tokens of a request through some columns of a head. If there are several tokens, the columns are copied
// next to each other first: rows of a state are so far apart that few of them fit into the level-1 cache.
template <int64_t kVectors, class Lanes>
void attend(const LlmcLinearAttention& a, const llmc::Carried& request, int64_t head, int64_t column, Lanes lanes) {
  constexpr int64_t kWidth = kVectors * llmc::kLanes;
  float near[kVectors > kAgain ? 1 : kWidestKey * kWidth];
  float* state = request.state + head * a.key_dim * a.value_dim + column;
  const bool is_near = kVectors <= kAgain && request.end - request.first > 1;
  const auto copy = [&](float* to, int64_t step, const float* from, int64_t from_step) {
    for (int64_t i = 0; i < a.key_dim; i++)
      for (int64_t c = 0; c < kWidth; c += llmc::kLanes) {
        const llmc::Vec values = from == nullptr ? llmc::Vec{} : llmc::load(from + i * from_step + c, lanes);
        llmc::store(to + i * step + c, values, lanes);
      }
  };
  Head h = {head, head / (a.heads / a.groups) * a.key_dim, column, state, a.value_dim};
  if (is_near) h.state = near, h.stride = kWidth;
  if (is_near || !request.has_state) copy(h.state, h.stride, request.has_state ? state : nullptr, a.value_dim);
  attend_all<kVectors>(a, request, h, lanes);
  if (is_near) copy(state, a.value_dim, near, kWidth);
}

// Processes kVectors vectors at a time while they fit before `end`; returns the first remaining column.
template <int64_t kVectors>
int64_t attend_across(const LlmcLinearAttention& a, const llmc::Carried& request, int64_t head, int64_t column,
                      int64_t end) {
  constexpr int64_t kWidth = kVectors * llmc::kLanes;
  for (; column + kWidth <= end; column += kWidth) attend<kVectors>(a, request, head, column, llmc::AllLanes{});
  return column;
}

void linear_attention(LlmcPool* pool, const LlmcLinearAttention& a) {
  constexpr int64_t kWidth = kOnce * llmc::kLanes;
  const int64_t parts = (a.value_dim + kWidth - 1) / kWidth;
  llmc::for_parts(pool, a, a.heads * a.key_dim * a.value_dim, a.heads * parts, 2 * a.key_dim * kWidth,
                  [&](const llmc::Carried& request, int64_t part) {
                    const int64_t head = part / parts, end = std::min(a.value_dim, (part % parts + 1) * kWidth);
                    int64_t column = part % parts * kWidth;
                    if (request.end - request.first == 1) column = attend_across<kOnce>(a, request, head, column, end);
                    column = attend_across<kAgain>(a, request, head, column, end);
                    column = attend_across<1>(a, request, head, column, end);
                    if (column < end) attend<1>(a, request, head, column, end - column);
                  });
}

}  // namespace

LLMC_KERNEL(LlmcLinearAttention, linear_attention, linear_attention)
