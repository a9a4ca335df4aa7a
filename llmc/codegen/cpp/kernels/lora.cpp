// Adds adapters to a product's sums: delta[t] = (x[t] · A[s]ᵀ) · B[s], at each adapter's own rank, in fp32.
//
// The tokens of a step are grouped by adapter, and a few tokens of a group are processed at a time, so that A and B are
// read once for them. The delta of a token does not depend on other tokens. Tokens without an adapter are skipped, and
// a step without adapters costs one comparison. Sums over channels and ranks have a fixed order.
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

// Some tokens of one adapter.
template <class T>
struct Group {
  const LlmcLora& a;
  const int32_t* tokens;
  int64_t count, slot;

  float* shrunk(int64_t i, int64_t part) const {
    return static_cast<float*>(a.shrunk.data) + tokens[i] * a.shrunk.stride + part * a.max_rank;
  }

  // x · row for some rows of A, each summed by itself in the order of the channels.
  template <int kRows>
  void shrink_rows(const T* x, const T* rows, float* to) const {
    Vec sums[kRows] = {};
    for_vectors(a.channels, [&](int64_t c, auto lanes) {
      const Vec value = load(x + c, lanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) sums[r] = fma(value, load(rows + r * a.channels + c, lanes), sums[r]);
    });
    for (int r = 0; r < kRows; r++) to[r] = sum_of(sums[r]);
  }

  void shrink(int64_t part, int64_t rank) const {
    const T* rows = static_cast<const T*>(a.lora_a) + (slot * a.parts + part) * a.max_rank * a.channels;
    for (int64_t i = 0; i < count; i++) {
      const T* x = row_of<const T>(a.x, tokens[i]);
      int64_t r = 0;
      for (; r + 4 <= rank; r += 4) shrink_rows<4>(x, rows + r * a.channels, shrunk(i, part) + r);
      for (; r < rank; r++) shrink_rows<1>(x, rows + r * a.channels, shrunk(i, part) + r);
    }
  }

  // Some vectors of columns of the tokens from `first` on, in the order of the ranks.
  template <int kTokens, int kVecs, class Lanes>
  void expand_block(int64_t first, int64_t part, int64_t rank, int64_t begin, Lanes lanes) const {
    const T* rows = static_cast<const T*>(a.lora_b) + slot * a.max_rank * a.out + begin;
    const float* u[kTokens];
    for (int i = 0; i < kTokens; i++) u[i] = shrunk(first + i, part);
    Vec sums[kTokens][kVecs] = {};
    for (int64_t r = 0; r < rank; r++)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; v++) {
        const Vec row = load(rows + r * a.out + v * kLanes, lanes);
#pragma GCC unroll 4
        for (int i = 0; i < kTokens; i++) sums[i][v] = fma(broadcast(u[i][r]), row, sums[i][v]);
      }
    for (int i = 0; i < kTokens; i++)
      for (int v = 0; v < kVecs; v++)
        store(row_of<float>(a.y, tokens[first + i]) + begin + v * kLanes, sums[i][v], lanes);
  }

  template <int kTokens>
  void expand(int64_t first, int64_t part, int64_t rank, int64_t begin, int64_t end) const {
    for (; begin + 4 * kLanes <= end; begin += 4 * kLanes)
      expand_block<kTokens, 4>(first, part, rank, begin, AllLanes{});
    for_vectors(end - begin,
                [&](int64_t c, auto lanes) { expand_block<kTokens, 1>(first, part, rank, begin + c, lanes); });
  }

  void add() const {
    const int64_t ends[] = {a.end0, a.end1, a.end2, a.end3};
    for (int64_t part = 0, begin = 0; part < a.parts; begin = ends[part++]) {
      const int64_t rank = static_cast<const int32_t*>(a.ranks)[slot * a.parts + part];
      shrink(part, rank);
      int64_t i = 0;
      for (; i + 4 <= count; i += 4) expand<4>(i, part, rank, begin, ends[part]);
      for (; i < count; i++) expand<1>(i, part, rank, begin, ends[part]);
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
