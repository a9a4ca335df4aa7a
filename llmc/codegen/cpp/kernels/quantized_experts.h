// llmc::expert_linear with quantized weights: each expert's pairs are runs of quantized_runs.h.
#pragma once
#include "experts.h"
#include "quantized_runs.h"

namespace llmc {

struct ExpertRuns {
  const LlmcQuantizedLinear& a;
  const SortedPairs sorted;

  // Calls body(runs) for the experts with at least `least` pairs and fewer than `fewer`, as many at a time as are packed
  // together: a decode step's in one parallel loop, however few each has.
  template <class Body>
  void each(int64_t least, int64_t fewer, const Body& body) const {
    const int64_t bytes = a.out / LLMC_PANEL * CodePanels(a, a.in).panel_bytes();
    const bool is_shared = a.tokens == 1 && a.x_slots == 1 && sorted.most(a.experts) == 1;
    std::array<Run, kBlockTokens> runs;
    int64_t count = 0, packed = 0;
    const auto flush = [&] {
      if (count > 0) body(Runs{runs.data(), count, is_shared});
      count = packed = 0;
    };
    for (int64_t expert = 0; expert < a.experts; expert++) {
      const int64_t pairs = sorted.count(expert);
      if (pairs < least || pairs >= fewer) continue;
      for (int64_t done = 0; done < pairs; done += kBlockTokens) {
        const int64_t tokens = std::min(kBlockTokens, pairs - done);
        if (packed + tokens > kBlockTokens || count == kBlockTokens) flush();
        const auto* weight = static_cast<const uint8_t*>(a.weight) + expert * bytes;
        const float* bias = a.bias == nullptr ? nullptr : a.bias + expert * a.out;
        runs[static_cast<size_t>(count++)] = {sorted.start(expert) + done, tokens, weight, bias, packed};
        if (!is_shared) packed += tokens;
      }
    }
    flush();
  }
};

}  // namespace llmc
