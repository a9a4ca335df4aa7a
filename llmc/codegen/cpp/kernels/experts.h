// llmc::expert_linear: a product for each expert, of the pairs of a token and a slot that were sent to it.
//
// An expert's weights are a run of whole panels. Sums are those of linear.h, which do not depend on how many pairs an
// expert has, so a token's result does not depend on its neighbours.
#pragma once
#include <algorithm>
#include <array>

#include "linear.h"

namespace llmc {

constexpr int64_t kMostExperts = 1024;  // MOST_EXPERTS in llmc/codegen/cpp/products.py

// Where each expert's pairs are among all, sorted by expert.
struct SortedPairs {
  std::array<int32_t, kMostExperts + 1> starts{};

  int64_t start(int64_t expert) const { return starts[static_cast<size_t>(expert)]; }
  int64_t count(int64_t expert) const { return start(expert + 1) - start(expert); }
  int64_t most(int64_t experts) const {
    int64_t found = 0;
    for (int64_t expert = 0; expert < experts; expert++) found = std::max(found, count(expert));
    return found;
  }
};

// Sorts pairs by expert, keeping the order of each expert's pairs. a: has an index [tokens, slots] and room for
// tokens · slots pairs. y is zero where the index does not name an expert.
template <class T, class Arguments>
SortedPairs sort_pairs(const Arguments& a) {
  const int64_t pairs = a.tokens * a.slots;
  SortedPairs sorted;
  auto& ends = sorted.starts;
  const auto is_expert = [&](int64_t pair) { return a.index[pair] >= 0 && a.index[pair] < a.experts; };
  for (int64_t pair = 0; pair < pairs; pair++)
    if (is_expert(pair))
      ends[static_cast<size_t>(a.index[pair]) + 1]++;
    else
      std::fill_n(static_cast<T*>(a.y.data) + pair / a.slots * a.y.stride + pair % a.slots * a.out, a.out, T{});
  for (size_t expert = 0; expert < static_cast<size_t>(a.experts); expert++) ends[expert + 1] += ends[expert];
  // Each expert's start moves on with its pairs, to where the next one's was.
  for (int64_t pair = 0; pair < pairs; pair++)
    if (is_expert(pair)) a.pairs[ends[static_cast<size_t>(a.index[pair])]++] = static_cast<int32_t>(pair);
  std::copy_backward(ends.begin(), ends.begin() + a.experts, ends.begin() + a.experts + 1);
  ends[0] = 0;
  return sorted;
}

// Calls multiply(expert, arguments) for each expert that has pairs, with those and their number as its tokens.
template <class T, class Arguments, class Multiply>
void for_experts(const Arguments& a, const Multiply& multiply) {
  const SortedPairs sorted = sort_pairs<T>(a);
  for (int64_t expert = 0; expert < a.experts; expert++) {
    if (sorted.count(expert) == 0) continue;
    Arguments one = a;
    one.tokens = sorted.count(expert);
    one.pairs = a.pairs + sorted.start(expert);
    if (a.bias != nullptr) one.bias = a.bias + expert * a.out;
    multiply(expert, one);
  }
}

template <class T>
void expert_linear(LlmcPool* pool, const LlmcLinear& a) {
  const int64_t steps = (a.in + PanelProduct<T>::kStep - 1) / PanelProduct<T>::kStep;
  for_experts<T>(a, [&](int64_t expert, LlmcLinear one) {
    one.weight = static_cast<const T*>(a.weight) + expert * a.out * steps * PanelProduct<T>::kStep;
    linear<T>(pool, one);
  });
}

}  // namespace llmc
