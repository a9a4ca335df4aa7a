// Products of runs of tokens with a quantized weight each: the whole of x with one, or each expert's tokens with its own.
//
// One parallel loop goes over the panels of all runs, so threads take them from whichever expert has some left. Every
// panel is read from memory once, while all tiles of the run's tokens go over each of its blocks of k in cache. A
// token's sums do not depend on its run.
#pragma once
#include "experts.h"
#include "quantized_linear.h"

namespace llmc {

// The tokens from `start` on. first: which of the packed tokens the first of them is.
struct Run {
  int64_t start, tokens;
  const void* weight;
  const float* bias;
  int64_t first;
};

// Runs whose tokens are packed together, kBlockTokens at most. is_shared: all are of the same one row of x.
struct Runs {
  const Run* data;
  int64_t count;
  bool is_shared;

  int64_t packed_tokens() const { return data[count - 1].first + data[count - 1].tokens; }
  int64_t longest() const {
    const auto shorter = [](const Run& a, const Run& b) { return a.tokens < b.tokens; };
    return std::max_element(data, data + count, shorter)->tokens;
  }
};

// The runs of a product with one weight.
struct WholeRuns {
  const LlmcQuantizedLinear& a;

  // Calls body(runs) where the weight has at least `least` tokens, and fewer than `fewer`.
  template <class Body>
  void each(int64_t least, int64_t fewer, const Body& body) const {
    if (a.tokens < least || a.tokens >= fewer) return;
    for (int64_t start = 0; start < a.tokens; start += kBlockTokens) {
      const Run run{start, std::min(kBlockTokens, a.tokens - start), a.weight, a.bias, 0};
      body(Runs{&run, 1, false});
    }
  }
};

// The runs of llmc::expert_linear: each expert's pairs of a token and a slot. T: of x.
template <class T>
struct ExpertRuns {
  const LlmcQuantizedLinear& a;
  const SortedPairs sorted = sort_pairs<T>(a);

  // Calls body(runs) for the experts that have at least `least` and fewer than `fewer` pairs. Each call gets the
  // experts that are packed together: those of a decode step run in one parallel loop, however few pairs each has.
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

template <class Product, class T, class Epilogue>
class RunProduct {
  using X = typename Product::X;

 public:
  RunProduct(LlmcPool* pool, const LlmcQuantizedLinear& a, const Run& run, int64_t packed_tokens)
      : a_(with_weight(a, run)),
        run_(run),
        panels_(a_, a_.in),
        tiles_(tiles_of(run.tokens)),
        packed_tokens_(packed_tokens) {
    auto* scales = static_cast<float*>(pool->scratch(0));
    x_.scales = scales + run.first;
    x_.data = reinterpret_cast<X*>(scales + packed_tokens) + run.first * (run.first == 0 ? 0 : x_.token_size());
  }
  RunProduct(const RunProduct&) = delete;
  RunProduct& operator=(const RunProduct&) = delete;

  static Tiles tiles_of(int64_t tokens) { return {tokens, BlockProduct<Product>::tallest(decodes(tokens))}; }
  int64_t tiles() const { return tiles_.count; }
  void pack(int64_t tile) const { x_.template pack<T>(a_, run_.start, tile); }

  // The panels from first to end. scratch: of the calling thread.
  void multiply(int64_t first, int64_t end, void* scratch) const {
    const int64_t tokens = run_.tokens;
    auto* sums = static_cast<float*>(scratch) + packed_tokens_ * (1 + packed_floats(a_.in));
    sum_up(first, end, sums);
    const Epilogue epilogue{a_};
    for (int64_t panel = first; panel < end; panel++)
      for (int64_t t = 0; t < tokens; t++) {
        float* of_token = sums + ((panel - first) * tokens + t) * LLMC_PANEL;
        for (int lane = 0; lane < LLMC_PANEL; lane += kLanes)
          store(of_token + lane, load(of_token + lane) * x_.scales[t]);
        epilogue(run_.start + t, panel, of_token);
      }
  }

 private:
  // Sets sums [panels, tokens, LLMC_PANEL], behind which scratch is free.
  void sum_up(int64_t first, int64_t end, float* sums) const {
    if constexpr (BlockProduct<Product>::kTakesOne)
      if (run_.tokens == 1) {
        for (int64_t panel = first; panel < end; panel++)
          BlockProduct<Product>::multiply_one(panels_, panel, x_.data, sums + (panel - first) * LLMC_PANEL);
        return;
      }
    const int64_t tokens = run_.tokens;
    float* operands = cache_line_from(sums + (end - first) * tokens * LLMC_PANEL);
    auto* bytes = reinterpret_cast<uint8_t*>(operands + kCodeBlockBytes);  // behind a decoded block of those
    auto* headers = reinterpret_cast<uint8_t*>(operands + kCodeBlockBytes * 2);  // behind all of that
    BlockProduct<Product> multiply{tiles_, decodes(tokens), operands};
    const SparsePanels sparse = panels_.sparse(Epilogue{a_}.panels());
    SparseCursor cursors[kMostPanelsTogether];
    if (panels_.is_sparse)
      for (int64_t panel = first; panel < end; panel++) cursors[panel - first] = sparse.cursor(panel);
    const X* values = x_.data;
    for (int64_t k = 0; k < a_.in;) {
      const Part part = part_from(panels_, k);
      for (int64_t panel = first; panel < end; panel++) {
        float* panel_sums = sums + (panel - first) * tokens * LLMC_PANEL;
        SparseCursor& cursor = cursors[panel - first];
        CodeBlock block = panels_.is_sparse ? sparse_block(panels_, sparse, panel, part, cursor, bytes)
                                            : block_of(panels_, panel, part);
        if (panels_.is_blocked()) decode_headers(block, k, headers);
        if (panels_.is_joined()) join_planes(block, bytes);
        if constexpr (BlockProduct<Product>::kReadsSparse)
          if (panels_.is_sparse && multiply.expands_on_the_way()) {
            multiply(block, cursor, bytes, values, x_.part_size(part), panel_sums, k == 0);
            continue;
          }
        if (panels_.is_sparse) expand(cursor, block.groups * block.group_bytes / 64, bytes);
        multiply(block, values, x_.part_size(part), panel_sums, k == 0);
      }
      values += x_.part_size(part) * tokens;
      k += part.count;
    }
  }

  static bool decodes(int64_t tokens) { return Product::kDecodes && tokens > kCodeTokens; }
  static LlmcQuantizedLinear with_weight(const LlmcQuantizedLinear& a, const Run& run) {
    LlmcQuantizedLinear one = a;
    one.weight = run.weight;
    one.bias = run.bias;
    return one;
  }

  const LlmcQuantizedLinear a_;
  const Run& run_;
  const CodePanels panels_;
  const Tiles tiles_;
  const int64_t packed_tokens_;
  PackedX<Product> x_{panels_, tiles_, run_.tokens, nullptr, nullptr};
};

// Panels that a thread multiplies consecutively: with one panel per product it would stop reading memory between two
// products. Panels of one token are read at 31 instead of 28 GB/s, of 35 possible (two Zen 4 cores, scales of 32
// codes).
constexpr int64_t kPanelsTaken = 4;

template <class Product, class T, class Epilogue>
void quantized_product(LlmcPool* pool, const LlmcQuantizedLinear& a, const Runs& runs) {
  const int64_t tokens = runs.packed_tokens(), longest = runs.longest(), packed = runs.is_shared ? 1 : runs.count;
  const auto product_of = [&](int64_t run) {
    return RunProduct<Product, T, Epilogue>(pool, a, runs.data[run], tokens);
  };
  // Each run gets the maximum number of tiles; tiles that do not exist are skipped.
  const int64_t most = RunProduct<Product, T, Epilogue>::tiles_of(longest).count;
  const auto pack = [&](int64_t index, void*) {
    const auto product = product_of(index / most);
    if (index % most < product.tiles()) product.pack(index % most);
  };
  parallel_for(pool, packed * most, pack, tokens * a.in < kSerialPack);
  const int64_t panels = Epilogue{a}.panels();
  const int64_t together = BlockProduct<Product>::kIsTiled ? panels_together(longest) : 1;
  // Panels per product; at least 16 products per thread, so that threads finish at about the same time.
  const int64_t taken = std::max(together, std::clamp<int64_t>(runs.count * panels / (16 * pool->threads()), 1, kPanelsTaken));
  const int64_t groups = (panels + taken - 1) / taken;
  parallel_for(pool, runs.count * groups, [&](int64_t index, void* scratch) {
    const int64_t begin = index % groups * taken, end = std::min(begin + taken, panels);
    const auto product = product_of(index / groups);
    for (int64_t first = begin; first < end; first += together)
      product.multiply(first, std::min(first + together, end), scratch);
  });
}

}  // namespace llmc
