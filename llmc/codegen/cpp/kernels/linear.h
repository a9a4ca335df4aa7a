// Matrix products over weight panels: packing x into tiles, sharing the panels among threads, and the epilogues.
//
// Every panel is read from memory once per block of tokens, while all tiles of tokens go over each of its blocks of
// k in cache. Bytes moved: the weights, plus x once per panel from cache. See panel_product.h for the inner loop.
#pragma once
#include <algorithm>
#include <type_traits>

#include "activation.h"
#include "kernel.h"
#include "panel_product.h"
#include "prefetcher.h"
#include "thread_pool.h"

// y = activation(x · weightᵀ + bias + delta) · scale + residual  (llmc::linear, llmc::fused_linear)
typedef struct {
  int64_t tokens, in, out;
  LlmcRows x;           // [tokens, in]
  const void* weight;   // panels of [out, in]
  const float* bias;    // [out] or null
  LlmcRows residual;    // [tokens, out] or null data
  LlmcRows y;           // [tokens, out]
  int32_t activation;
  float scale;
  const int32_t* index;  // of experts: [tokens, slots] (experts.h); else null, as the next
  int32_t* pairs;
  int64_t slots, x_slots, experts;
  LlmcRows delta;           // of adapters, fp32: [tokens, rows of the weight]; see lora.cpp
  const int32_t* adapters;  // [tokens], 0 for none, whose delta is not read; null: no token has one
} LlmcLinear;

namespace llmc {

// Tokens whose packed x and sums are held in scratch at a time; weights are read again for each such block.
constexpr int64_t kBlockTokens = 512;
// Packing fewer elements of x than this takes less time than sharing them among threads.
constexpr int64_t kSerialPack = 16384;
// k per panel block: half a level-1 cache of 48 KiB, which leaves room for a tile of x. Storing the sums in between
// costs 2%; a block that does not fit costs 4%.
template <class T>
constexpr int64_t kBlockIn = 24576 / (LLMC_PANEL * sizeof(T));

// Upper bound of the floats of one packed token, for any type and for quantized weights (words of eight codes).
// Weights with minima take one more float per group of 16.
inline int64_t packed_floats(int64_t in) { return (in + in / 16 + 15) / 8 * 8; }

// Size of a block of codes in cache, and how far ahead memory is read; twice this size is slower.
constexpr int64_t kCodeBlockBytes = 8192;
// Room for one such block with each code decoded to a float, or for a block of bytes both decoded and as stored; for
// the scales and minima of its groups; and for the alignment to a cache line.
constexpr int64_t kBlockGroups = 16;  // of 16 k with codes of 8 bits, or of 32 with 4: of blocked formats
constexpr int64_t kDecodedFloats = kCodeBlockBytes * 2 + kBlockGroups * 2 * LLMC_PANEL + 16;

// Panels whose blocks are multiplied consecutively by the same k of x, so that x stays in the level-2 cache. Tiles are
// so fast that reading the x of many tokens would otherwise limit them; the x of a few tokens fits anyway.
constexpr int64_t kMostPanelsTogether = 4;
constexpr int64_t panels_together(int64_t tokens) { return kHasTiles && tokens > 64 ? kMostPanelsTogether : 1; }

// Scratch bytes of one thread: packed x, a scale for each token, the sums of some panels, a decoded block.
inline int64_t linear_scratch_bytes(int64_t tokens, int64_t in) {
  const int64_t sums = panels_together(tokens) * LLMC_PANEL;
  const int64_t floats = std::min(tokens, kBlockTokens) * (packed_floats(in) + 1 + sums) + kDecodedFloats;
  return floats * static_cast<int64_t>(sizeof(float));
}

// `tokens` split into the fewest tiles of at most `tallest`, of heights that differ by at most one, taller ones first.
struct Tiles {
  Tiles(int64_t tokens, int64_t tallest)
      : count((tokens + tallest - 1) / tallest), height(tokens / count), taller(tokens % count) {}
  int64_t tokens() const { return start(count); }
  int64_t start(int64_t tile) const { return tile * height + std::min(tile, taller); }
  int64_t height_of(int64_t tile) const { return height + (tile < taller); }

  int64_t count, height, taller;
};

template <class T>
inline T* cache_line_from(T* pointer) {
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(pointer) + 63) / 64 * 64);
}

// ---- rows --------------------------------------------------------------------------------------------------------
// Of a product's tokens: all in order, or for an expert the pairs of a token and a slot that were sent to it.
template <class T, class Arguments>
inline const T* x_row(const Arguments& a, int64_t t) {
  const auto* x = static_cast<const T*>(a.x.data);
  if (a.pairs == nullptr) return x + t * a.x.stride;
  const int64_t token = a.pairs[t] / a.slots, slot = a.pairs[t] % a.slots;
  return x + token * a.x.stride + (a.x_slots > 1 ? slot * a.in : 0);
}

template <class T, class Arguments>
inline T* y_row(const Arguments& a, int64_t t) {
  auto* y = static_cast<T*>(a.y.data);
  if (a.pairs == nullptr) return y + t * a.y.stride;
  return y + a.pairs[t] / a.slots * a.y.stride + a.pairs[t] % a.slots * a.out;
}

// ---- packing x -------------------------------------------------------------------------------------------------
inline void pack_pair(const bf16* row, int64_t k, int64_t in, uint32_t* to, int64_t) {
  *to = row[k].bits | (k + 1 < in ? static_cast<uint32_t>(row[k + 1].bits) << 16 : 0u);
}
inline void pack_pair(const bf16* row, int64_t k, int64_t in, float* to, int64_t height) {
  to[0] = to_float(row[k]);
  to[height] = k + 1 < in ? to_float(row[k + 1]) : 0.0f;
}

// One tile: to[step][value of the step][token], odd `in` padded with zeros; row(t): of a token. Goes over 64 bytes of
// each row at a time: rows that are a multiple of 4 KiB apart would push each other out of the cache.
template <class T, class Row>
void pack_tile(const Row& row, int64_t in, int64_t height, typename PanelProduct<T>::X* to) {
  using Product = PanelProduct<T>;
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<T, bf16>) {  // rows of 16 steps, as tiles are loaded
    for (int64_t k = 0; k < in; k += 2 * kTileRows) {
      const int64_t channels = std::min(2 * kTileRows, in - k), steps = (channels + 1) / 2;
      for (int64_t t = 0; t < height; t++, to += steps) {
        to[steps - 1] = 0;
        std::memcpy(to, row(t) + k, static_cast<size_t>(channels) * sizeof(bf16));
      }
    }
    return;
  }
#endif
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t line = 0; line < in; line += kLine)
    for (int64_t t = 0; t < height; t++) {
      const auto* x = row(t);
      for (int64_t k = line; k < std::min(in, line + kLine); k += Product::kStep) {
        auto* of_step = to + k / Product::kStep * Product::kXPerStep * height + t;
        if constexpr (Product::kStep == 1)
          *of_step = to_float(x[k]);
        else
          pack_pair(x, k, in, of_step, height);
      }
    }
}

// Packs channels k to k + in of the tokens from `first` on, tile by tile.
template <class T, class Row>
void pack_tiles(const Tiles& tiles, const Row& row, int64_t first, int64_t k, int64_t in,
                typename PanelProduct<T>::X* to) {
  for (int64_t tile = 0; tile < tiles.count; tile++) {
    const int64_t height = tiles.height_of(tile), start = first + tiles.start(tile);
    pack_tile<T>([&](int64_t t) { return row(start + t) + k; }, in, height, to);
    to += (in + PanelProduct<T>::kStep - 1) / PanelProduct<T>::kStep * PanelProduct<T>::kXPerStep * height;
  }
}

// ---- epilogues: what is done with the sums of one token and one panel ------------------------------------------
// What a token's adapter adds to its sums; null for one that has none.
template <class Arguments>
inline const float* delta_row(const Arguments& a, int64_t token) {
  if (a.adapters == nullptr || a.adapters[token] == 0) return nullptr;
  return static_cast<const float*>(a.delta.data) + token * a.delta.stride;
}

// y = activation(sum + bias) · scale + residual, both of type T: that of x, or float of logits
template <class T, class Arguments>
struct LinearEpilogue {
  const Arguments& a;

  static constexpr int64_t kOutputs = LLMC_PANEL;  // of a panel
  int64_t panels() const { return (a.out + kOutputs - 1) / kOutputs; }

  void operator()(int64_t token, int64_t panel, const float* sums) const {
    const int64_t end = std::min(a.out - panel * kOutputs, kOutputs);
    T* row = y_row<T>(a, token);
    const float* delta = delta_row(a, token);
    for (int64_t lane = 0; lane < end; lane += kLanes) {
      const int64_t o = panel * kOutputs + lane, count = std::min<int64_t>(end - lane, kLanes);
      Vec y = load(sums + lane);
      if (a.bias != nullptr) y = y + load(a.bias + o, count);
      if (delta != nullptr) y = y + load(delta + o, count);
      y = activate(static_cast<LlmcActivation>(a.activation), y) * a.scale;
      if (a.residual.data != nullptr)
        y = y + load(static_cast<const T*>(a.residual.data) + token * a.residual.stride + o, count);
      store(row + o, y, count);
    }
  }
};

// y = activation(gate sum + bias) · (up sum + bias)
template <class T, class Arguments>
struct GatedEpilogue {
  const Arguments& a;

  static constexpr int64_t kOutputs = LLMC_PANEL / 2;
  int64_t panels() const { return (a.out + kOutputs - 1) / kOutputs; }

  void operator()(int64_t token, int64_t panel, const float* sums) const {
    const int64_t end = std::min(a.out - panel * kOutputs, kOutputs);
    T* row = y_row<T>(a, token);
    const float* delta = delta_row(a, token);
    for (int64_t lane = 0; lane < end; lane += kLanes) {
      const int64_t o = panel * kOutputs + lane, count = std::min<int64_t>(end - lane, kLanes);
      Vec gate = load(sums + lane), up = load(sums + kOutputs + lane);
      if (a.bias != nullptr) {
        gate = gate + load(a.bias + o, count);
        up = up + load(a.bias + a.out + o, count);
      }
      if (delta != nullptr) {
        gate = gate + load(delta + o, count);
        up = up + load(delta + a.out + o, count);
      }
      const Vec y = activate(static_cast<LlmcActivation>(a.activation), gate) * up;
      store(row + o, y, count);
    }
  }
};

// ---- the product -----------------------------------------------------------------------------------------------
// Some steps of k of one panel, to be multiplied with all tiles of tokens: where these lie packed, and their sums.
template <class T>
struct PanelBlock {
  int64_t panel, step, count;
  const Tiles& tiles;
  const typename PanelProduct<T>::X* x;
  float* sums;
};

// Multiplies the tiles from `from` on. Prefetches memory from `next` on evenly, next_stride elements per step; a stride
// of zero prefetches nothing.
template <class T>
inline void multiply_tiles(TileProduct<T>& multiply, const PanelBlock<T>& block, int64_t from, const T* weight,
                           const T* next, int64_t next_stride) {
  for (int64_t tile = from; tile < block.tiles.count; tile++) {
    const int64_t height = block.tiles.height_of(tile), start = block.tiles.start(tile);
    const auto* values = block.x + start * block.count * PanelProduct<T>::kXPerStep;
    float* sums = block.sums + start * LLMC_PANEL;
    multiply(height, weight, values, block.count, sums, block.step == 0, next, next_stride);
    next += block.count * next_stride;
  }
}

// The panels of a dense weight with `steps` steps each. Reader: reads the panels from first to end in one thread.
template <class T>
struct DensePanels {
  const T* weight;
  int64_t steps;

  class Reader {
   public:
    Reader(const DensePanels& panels, int64_t first, int64_t end, void*)
        : weight_(panels.weight), steps_(panels.steps), first_(first), end_(end) {}

    void multiply(const PanelBlock<T>& block) {
      constexpr int64_t kRow = LLMC_PANEL * PanelProduct<T>::kStep;
      const int64_t panel_elements = steps_ * kRow, after = block.step + block.count;
      const T* weight = weight_ + block.panel * panel_elements + block.step * kRow;
      const T* next = block.panel + 1 < end_ ? weight + panel_elements
                      : after < steps_       ? weight_ + first_ * panel_elements + after * kRow
                                             : weight_ + end_ * panel_elements;
      const int64_t count = block.tiles.count, stride = (kRow + count - 1) / count;
      const bool asks = !is_read_ahead(block.tiles.tokens(), 8);
      multiply_tiles(product_, block, 0, weight, asks ? next : weight, asks ? stride : 0);
    }

   private:
    const T* weight_;
    int64_t steps_, first_, end_;
    TileProduct<T> product_;
  };
};

// Panels: as DensePanels. The memory that a Reader is given holds a decoded block. Epilogue: of `a`. OfX: the type of x,
// which is multiplied as T.
template <class T, class Epilogue, class OfX = T, class Arguments, class Panels>
void panels_product(LlmcPool* pool, const Arguments& a, const Panels& weight) {
  using Product = PanelProduct<T>;
  using X = typename Product::X;
  const int64_t steps = (a.in + Product::kStep - 1) / Product::kStep, block_steps = kBlockIn<T> / Product::kStep;
  const Epilogue epilogue{a};
  const int64_t panels = epilogue.panels();

  for (int64_t start = 0; start < a.tokens; start += kBlockTokens) {
    const int64_t tokens = std::min(kBlockTokens, a.tokens - start);
    const Tiles tiles(tokens, Product::kTokens);
    // The tiles of one block of k lie together: that is the order in which they are read.
    X* packed = static_cast<X*>(pool->scratch(0));
    const auto pack = [&](int64_t block, void*) {
      const int64_t k = block * kBlockIn<T>, in = std::min(kBlockIn<T>, a.in - k);
      X* to = packed + block * block_steps * tokens * Product::kXPerStep;
      pack_tiles<T>(tiles, [&](int64_t t) { return x_row<OfX>(a, t); }, start, k, in, to);
    };
    const int64_t blocks = (steps + block_steps - 1) / block_steps;
    parallel_for(pool, blocks, pack, tokens * a.in < kSerialPack);

    const int64_t sums_offset = tokens * steps * Product::kXPerStep * static_cast<int64_t>(sizeof(X));
    const int64_t together = panels_together(tokens);
    parallel_for(pool, (panels + together - 1) / together, [&](int64_t group, void* scratch) {
      const int64_t first = group * together, end = std::min(first + together, panels);
      auto* sums = reinterpret_cast<float*>(static_cast<std::byte*>(scratch) + sums_offset);
      typename Panels::Reader reader(weight, first, end, sums + together * tokens * LLMC_PANEL);
      for (int64_t step = 0; step < steps; step += block_steps)
        for (int64_t panel = first; panel < end; panel++)
          reader.multiply({panel, step, std::min(block_steps, steps - step), tiles,
                           packed + step * tokens * Product::kXPerStep, sums + (panel - first) * tokens * LLMC_PANEL});
      for (int64_t panel = first; panel < end; panel++)
        for (int64_t t = 0; t < tokens; t++)
          epilogue(start + t, panel, sums + ((panel - first) * tokens + t) * LLMC_PANEL);
    });
  }
}

template <class T, class Epilogue>
void dense_product(LlmcPool* pool, const LlmcLinear& a) {
  constexpr int64_t kStep = PanelProduct<T>::kStep;
  panels_product<T, Epilogue>(pool, a, DensePanels<T>{static_cast<const T*>(a.weight), (a.in + kStep - 1) / kStep});
}

template <class T>
constexpr auto linear = dense_product<T, LinearEpilogue<T, LlmcLinear>>;

// y = activation(x · gateᵀ + bias[:out]) · (x · upᵀ + bias[out:]); weight: gated panels of [2·out, in]; scale and
// residual are not used                                            (llmc::gated_linear)
template <class T>
constexpr auto gated_linear = dense_product<T, GatedEpilogue<T, LlmcLinear>>;

// y (always fp32) = x · weightᵀ + bias                             (llmc::lm_head)
template <class T>
constexpr auto lm_head = dense_product<T, LinearEpilogue<float, LlmcLinear>>;

}  // namespace llmc
