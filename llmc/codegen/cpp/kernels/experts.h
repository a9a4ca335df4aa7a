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

// Calls multiply(expert, arguments) for each expert that has pairs, with those and their number as its tokens. a: with
// an index [tokens, slots] and room for as many pairs. Where the index is no expert, y is zero.
template <class T, class Arguments, class Multiply>
void for_experts(const Arguments& a, const Multiply& multiply) {
  const int64_t pairs = a.tokens * a.slots;
  std::array<int32_t, kMostExperts + 1> ends{};
  const auto is_expert = [&](int64_t pair) { return a.index[pair] >= 0 && a.index[pair] < a.experts; };
  for (int64_t pair = 0; pair < pairs; pair++)
    if (is_expert(pair))
      ends[static_cast<size_t>(a.index[pair]) + 1]++;
    else
      std::fill_n(static_cast<T*>(a.y.data) + pair / a.slots * a.y.stride + pair % a.slots * a.out, a.out, T{});
  for (size_t expert = 0; expert < static_cast<size_t>(a.experts); expert++) ends[expert + 1] += ends[expert];
  // Each expert's end is where it starts until its pairs are there, in their order.
  for (int64_t pair = 0; pair < pairs; pair++)
    if (is_expert(pair)) a.pairs[ends[static_cast<size_t>(a.index[pair])]++] = static_cast<int32_t>(pair);
  for (int64_t expert = 0, start = 0; expert < a.experts; expert++) {
    const int64_t end = ends[static_cast<size_t>(expert)];
    if (end > start) {
      Arguments one = a;
      one.tokens = end - start;
      one.pairs = a.pairs + start;
      if (a.bias != nullptr) one.bias = a.bias + expert * a.out;
      multiply(expert, one);
    }
    start = end;
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
