// What adapters add to a product's sums: delta[t] = (x[t] · A[s]ᵀ) · B[s], at each adapter's own rank, in fp32.
//
// The tokens of a step are grouped by adapter, and a group's are taken a few at a time, so that A and B are read once
// for those; what is added to one token does not depend on the others. Tokens without an adapter are passed over, and
// a step without any costs a comparison. Sums over channels and ranks run in one order.
#include <algorithm>

#include "row.h"

// adapters: [tokens], 0 or 1 + the slot s. lora_a: [slots, parts, max_rank, channels], lora_b: [slots, max_rank, out],
// both of the type of x; ranks: [slots, parts]. Part p has the columns of `out` from end_(p - 1) to end_p.
typedef struct {
  int64_t tokens, channels, out, slots, max_rank, parts;
  LlmcRows x;
  const void* lora_a;
  const void* lora_b;
  const void* ranks;
  const int32_t* adapters;
  int64_t end0, end1, end2, end3;
  int32_t* order;   // [2 · tokens], workspace: tokens by adapter, then where each handful of one adapter's begins
  LlmcRows shrunk;  // [tokens, parts · max_rank], workspace: x · Aᵀ
  LlmcRows y;
} LlmcLora;

namespace llmc {
namespace {

constexpr int64_t kTokensTogether = 8;

template <class T>
float dot(const T* a, const T* b, int64_t count) {
  Vec sums[2] = {};
  int64_t c = 0;
  for (; c + 2 * kLanes <= count; c += 2 * kLanes) {
    sums[0] = fma(load(a + c), load(b + c), sums[0]);
    sums[1] = fma(load(a + c + kLanes), load(b + c + kLanes), sums[1]);
  }
  for (; c < count; c += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, count - c);
    sums[0] = fma(load(a + c, lanes), load(b + c, lanes), sums[0]);
  }
  return sum_of(sums[0] + sums[1]);
}

// Some tokens of one adapter.
template <class T>
struct Group {
  const LlmcLora& a;
  const int32_t* tokens;
  int64_t count, slot;

  float* shrunk(int64_t i, int64_t part) const {
    return static_cast<float*>(a.shrunk.data) + tokens[i] * a.shrunk.stride + part * a.max_rank;
  }

  void shrink(int64_t part, int64_t rank) const {
    const T* rows = static_cast<const T*>(a.lora_a) + (slot * a.parts + part) * a.max_rank * a.channels;
    for (int64_t r = 0; r < rank; r++)
      for (int64_t i = 0; i < count; i++)
        shrunk(i, part)[r] = dot(row_of<const T>(a.x, tokens[i]), rows + r * a.channels, a.channels);
  }

  // Columns from `begin` on: as many as `lanes` says.
  template <class Lanes>
  void expand(int64_t part, int64_t rank, int64_t begin, Lanes lanes) const {
    const T* rows = static_cast<const T*>(a.lora_b) + slot * a.max_rank * a.out + begin;
    Vec sums[kTokensTogether] = {};
    for (int64_t r = 0; r < rank; r++) {
      const Vec row = load(rows + r * a.out, lanes);
      for (int64_t i = 0; i < count; i++) sums[i] = fma(broadcast(shrunk(i, part)[r]), row, sums[i]);
    }
    for (int64_t i = 0; i < count; i++) store(row_of<float>(a.y, tokens[i]) + begin, sums[i], lanes);
  }

  void add() const {
    const int64_t ends[] = {a.end0, a.end1, a.end2, a.end3};
    for (int64_t part = 0, begin = 0; part < a.parts; begin = ends[part++]) {
      const int64_t rank = static_cast<const int32_t*>(a.ranks)[slot * a.parts + part];
      shrink(part, rank);
      for_vectors(ends[part] - begin, [&](int64_t column, auto lanes) { expand(part, rank, begin + column, lanes); });
    }
  }
};

// Tokens with an adapter into `order`, those of one side by side, and after them where each handful of those begins, and
// where the last ends; how many handfuls there are.
inline int64_t order_tokens(const LlmcLora& a) {
  int64_t count = 0, handfuls = 0, begin = 0;
  for (int64_t t = 0; t < a.tokens; t++)
    if (a.adapters[t] != 0) a.order[count++] = static_cast<int32_t>(t);
  std::sort(a.order, a.order + count, [&](int32_t left, int32_t right) {
    return a.adapters[left] != a.adapters[right] ? a.adapters[left] < a.adapters[right] : left < right;
  });
  int32_t* starts = a.order + a.tokens;
  for (int64_t i = 0; i < count; i++)
    if (i == 0 || i - begin == kTokensTogether || a.adapters[a.order[i]] != a.adapters[a.order[begin]])
      starts[handfuls++] = static_cast<int32_t>(begin = i);
  if (handfuls < a.tokens) starts[handfuls] = static_cast<int32_t>(count);
  return handfuls;
}

template <class T>
void lora(LlmcPool* pool, const LlmcLora& a) {
  if (a.adapters == nullptr) return;
  const int64_t handfuls = order_tokens(a);
  const int32_t* starts = a.order + a.tokens;
  parallel_for(pool, handfuls, [&](int64_t i, void*) {
    const int64_t end = i + 1 < a.tokens ? starts[i + 1] : a.tokens;
    Group<T>{a, a.order + starts[i], end - starts[i], a.adapters[a.order[starts[i]]] - 1}.add();
  });
}

}  // namespace
}  // namespace llmc

LLMC_KERNELS(LlmcLora, lora, llmc::lora)
