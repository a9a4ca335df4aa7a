// The inner loop of products with quantized weights: sums[t][lane] (+)= Σ_k x[t][k] · weight[lane][k] for a tile of
// tokens, codes being decoded in registers.
//
// The codes of a group are summed up apart (as integers if x is int8 too), then scaled and added to the sums in fp32,
// groups in ascending order. Where the order of a sum shows in its bits, it does not depend on the height of the tile.
#pragma once
#include "float_product.h"
#include "integer_product.h"
#include "prefetcher.h"
#include "sparse_panels.h"

namespace llmc {

// The tallest tile. With AVX-512 eight tokens run at 88% of the VNNI peak; twelve would need every register, and GCC
// spills (60%).
constexpr int kCodeTokens = kLanes == 16 ? 8 : 4;

// The codes of some groups in one panel. Each group has a header, header_bytes apart, and `words` words of codes,
// group_bytes apart. next: the memory behind the codes; its first `bytes`, the size of this block, are read next.
// has_minima: whether minima follow the scales, which are fp32 then.
struct CodeBlock {
  const CodePanels& panels;
  const uint8_t* header;
  const uint8_t* codes;
  int64_t groups, words, header_bytes, group_bytes;
  const uint8_t* next;
  int64_t bytes;
  LlmcScales scale_type;
  bool has_minima = false;

  Vec scales(const uint8_t* of_group, int lane) const { return load_scales(of_group, scale_type, lane); }
  Vec minima(const uint8_t* of_group, int lane) const {
    return has_minima ? load(reinterpret_cast<const float*>(of_group) + LLMC_PANEL + lane) : Vec{};
  }
};

// The block, which begins at k, with headers in fp32, a scale and where there are some a minimum a group, which go `to`
// there.
inline void decode_headers(CodeBlock& block, int64_t k, uint8_t* to) {
  decode_headers(block.panels, block.header, k, block.groups, to);
  block.header = to;
  block.header_bytes = decoded_header_bytes(block.panels.record);
  block.scale_type = LLMC_SCALES_F32;
  block.has_minima = block.panels.record.has_minimum;
}

// Prefetches the memory that is read next, two cache lines at a time.
struct FetchCodes {
  const uint8_t* next;
  int64_t stride;

  __attribute__((always_inline)) void lines() {
    __builtin_prefetch(next);
    __builtin_prefetch(next + 64);
    next += stride;
  }
  // However many lines a stride is.
  void all() {
    for (const uint8_t* end = next + stride; next < end; next += 64) __builtin_prefetch(next);
  }
};

// By `tiles` of `tokens` together, each `fetches` times.
inline FetchCodes fetch_after(const CodeBlock& block, int64_t tokens, int64_t tiles, int64_t fetches) {
  // 4-bit codes are read at 32 GB/s if the prefetch targets lines that are already in cache, at 30 GB/s without a
  // prefetch, and at 25 GB/s if it targets the next block (two cores of a Zen 4). For 8-bit codes and one token both
  // prefetches are equally fast, and none reaches 0.9 of that.
  if (block.panels.bits == 4 && is_read_ahead(tokens, 4)) return {block.codes, 1};
  return {block.next, (block.bytes / fetches + tiles - 1) / tiles};
}

template <int kCount>
inline __attribute__((always_inline)) void load_words(const uint8_t* from, VecBits (&words)[kCount][kCodeVecs]) {
#pragma GCC unroll 4
  for (int i = 0; i < kCount; i++)
#pragma GCC unroll 2
    for (int v = 0; v < kCodeVecs; v++)
      std::memcpy(&words[i][v], from + i * LLMC_PANEL * 4 + v * kLanes * 4, sizeof words[i][v]);
}

#if defined(__AVX512VBMI2__)
// The next word of codes without their zeros; the cursor moves on.
inline __attribute__((always_inline)) void next_word(SparseCursor& at, VecBits (&words)[1][kCodeVecs]) {
#pragma GCC unroll 2
  for (int v = 0; v < kCodeVecs; v++) words[0][v] = reinterpret_cast<VecBits>(next_register<uint8_t>(at, *at.mask++));
}
#endif

// Scales and minima of a group: a weight is scale · code - minimum.
struct GroupScales {
  Vec scales[kCodeVecs], minima[kCodeVecs];
  bool has_minima;

  GroupScales(const CodeBlock& block, const uint8_t* header, int lane) : has_minima(block.has_minima) {
#pragma GCC unroll 2
    for (int v = 0; v < kCodeVecs; v++) {
      scales[v] = block.scales(header, lane + v * kLanes);
      minima[v] = block.minima(header, lane + v * kLanes);
    }
  }
};

// sums [kHeight] of lanes from `lane` on: += the running ones, scaled; or = if `set`. x: what is packed of the run.
template <class Terms, int kHeight, class Running>
inline __attribute__((always_inline)) void add_scaled(const Running& running, const GroupScales& group,
                                                      const typename Terms::X* x, bool set, float* sums) {
#pragma GCC unroll 16
  for (int t = 0; t < kHeight; t++)
#pragma GCC unroll 2
    for (int v = 0; v < kCodeVecs; v++) {
      float* sum = sums + t * LLMC_PANEL + v * kLanes;
      Vec before = set ? Vec{} : load(sum), scale = group.scales[v];
      if constexpr (Terms::kHasScale) scale *= broadcast(Terms::template scale<kHeight>(x, t));
      if constexpr (Terms::kHasMinimum)
        if (group.has_minima) before = fma(group.minima[v], broadcast(Terms::template less<kHeight>(x, t)), before);
      store(sum, fma(running.value(t, v), scale, before));
    }
}

// Adds a block to sums [kHeight][LLMC_PANEL], or sets them if `first`.
template <class Product, int kHeight>
void multiply_codes(const CodeBlock& block, const typename Product::X* x, float* sums, bool first, FetchCodes fetch) {
  constexpr int kWords = Product::kWords;
  const CodePanels& panels = block.panels;
  for (int lane = 0; lane < LLMC_PANEL; lane += kCodeVecs * kLanes) {
    const auto* values = x;
    const uint8_t* header = block.header;
    for (int64_t group = 0; group < block.groups; group++, header += block.header_bytes) {
      const uint8_t* word = block.codes + group * block.group_bytes + lane * 4;
      const GroupScales scales(block, header, lane);
      VecInt zeros[kCodeVecs];
#pragma GCC unroll 2
      for (int v = 0; v < kCodeVecs; v++) zeros[v] = load_zeros(panels, header, lane + v * kLanes);
      for (int64_t done = 0; done < block.words; done += Product::kRunWords) {
        typename Product::template Running<kHeight> running(panels.has_zeros, zeros, values);
        const auto* of_run = values;
        values += Product::kXPerRun * kHeight;
        const int64_t count = std::min(Product::kRunWords, block.words - done);
        // Not in a lambda: there GCC 12 would keep the sums in memory.
        int64_t i = 0;
        for (; i + kWords <= count; i += kWords) {
#pragma GCC unroll 4
          for (int line = 0; line < kWords; line++) fetch.lines();
          VecBits words[kWords][kCodeVecs];
          load_words(word, words);
          word += kWords * LLMC_PANEL * 4;
          running.add(words, zeros, values);
          values += kWords * Product::kXPerWord * kHeight;
        }
        if constexpr (kWords > 1)
          for (; i < count; i++) {
            fetch.lines();
            VecBits words[1][kCodeVecs];
            load_words(word, words);
            word += LLMC_PANEL * 4;
            running.add(words, zeros, values);
            values += Product::kXPerWord * kHeight;
          }
        add_scaled<typename Product::Terms, kHeight>(running, scales, of_run, first && group == 0 && done == 0,
                                                     sums + lane);
      }
    }
  }
}

#if defined(__AVX512VBMI2__)
// Without this, GCC 12 keeps each sum of a loop in two registers, and there are too few registers for eight tokens'
// sums.
#if defined(__clang__)
#define LLMC_KEEP_SUMS
#else
#define LLMC_KEEP_SUMS __attribute__((optimize("no-tree-ter")))
#endif

// The same for codes stored without zeros. Each word is expanded while the previous word is multiplied; if kKeeps, the
// expanded codes are kept at `keep` for other tiles. Returns where the block's codes end.
template <class Product, int kHeight, bool kKeeps>
LLMC_KEEP_SUMS SparseCursor multiply_sparse_codes(const CodeBlock& block, SparseCursor at, uint8_t* keep,
                                                  const typename Product::X* x, float* sums, bool first) {
  static_assert(Product::kWords == 1 && kCodeVecs * kLanes == LLMC_PANEL && kLanes * 4 == 64);
  const uint8_t* header = block.header;
  SparseCursor after = at;
  VecBits ahead[1][kCodeVecs];
  next_word(after, ahead);
  for (int64_t group = 0; group < block.groups; group++, header += block.header_bytes) {
    const GroupScales scales(block, header, 0);
    VecInt zeros[kCodeVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kCodeVecs; v++) zeros[v] = VecInt{} + block.panels.usual_zero();
    for (int64_t done = 0; done < block.words; done += Product::kRunWords) {
      typename Product::template Running<kHeight> running(false, zeros, x);
      const auto* of_run = x;
      x += Product::kXPerRun * kHeight;
      const int64_t count = std::min(Product::kRunWords, block.words - done);
      for (int64_t i = 0; i < count; i++) {
        VecBits words[1][kCodeVecs];
#pragma GCC unroll 2
        for (int v = 0; v < kCodeVecs; v++) {
          words[0][v] = ahead[0][v];
          if constexpr (kKeeps) std::memcpy(keep + v * 64, &words[0][v], 64);
        }
        if constexpr (kKeeps) keep += kCodeVecs * 64;
        at = after;
        at.fetch();
        // After the last word this reads past the block; the value is not used.
        next_word(after, ahead);
        running.add(words, zeros, x);
        x += Product::kXPerWord * kHeight;
      }
      add_scaled<typename Product::Terms, kHeight>(running, scales, of_run, first && group == 0 && done == 0, sums);
    }
  }
  return at;
}
#endif

// ---- many tokens: operands of x as it is, decoded once for all tiles ---------------------------------------------
// Without BF16 instructions decoding takes a quarter of the time of a tile of eight. The sums are the same, in order.
constexpr int kDecodedTokens = kLanes == 16 ? 14 : kLanes == 8 ? 6 : 4;
constexpr int kDecodedSteps = 4;  // at a time: no word has fewer codes

// to[lanes][word][step]: kCodeVecs vectors each, in the order in which they are used.
template <class Product>
void decode(const CodeBlock& block, float* to) {
  const CodePanels& panels = block.panels;
  for (int lane = 0; lane < LLMC_PANEL; lane += kCodeVecs * kLanes) {
    const uint8_t* header = block.header;
    for (int64_t group = 0; group < block.groups; group++, header += block.header_bytes) {
      const uint8_t* word = block.codes + group * block.group_bytes + lane * 4;
      VecInt zeros[kCodeVecs];
      for (int v = 0; v < kCodeVecs; v++) zeros[v] = load_zeros(panels, header, lane + v * kLanes);
      for (int64_t i = 0; i < block.words; i++) {
        VecBits words[1][kCodeVecs];
        load_words(word + i * LLMC_PANEL * 4, words);
        Product::operands(words, zeros, to);
        to += Product::kXPerWord * kCodeVecs * kLanes;
      }
    }
  }
}

// multiply_codes with operands that `decode` made of the block, `steps` of each group: the same for all formats.
template <class Terms, int kHeight>
void multiply_decoded(const CodeBlock& block, int64_t steps, const float* operands, const float* x, float* sums,
                      bool first, FetchCodes fetch) {
  constexpr int kOperands = kCodeVecs * kLanes;
  for (int lane = 0; lane < LLMC_PANEL; lane += kOperands) {
    const float* values = x;
    const uint8_t* header = block.header;
    for (int64_t group = 0; group < block.groups; group++, header += block.header_bytes) {
      const GroupScales scales(block, header, lane);
      for (int64_t done = 0; done < steps; done += kRunSteps) {
        const float* of_run = values;
        values += Terms::kXPerRun * kHeight;
        FloatSums<FloatSteps, kHeight> running;
        const int64_t end = std::min(done + kRunSteps, steps);
        for (int64_t step = done; step < end; step += kDecodedSteps) {
          fetch.lines();
#pragma GCC unroll 4
          for (int i = 0; i < kDecodedSteps; i++) {
            Vec w[kCodeVecs];
#pragma GCC unroll 2
            for (int v = 0; v < kCodeVecs; v++) w[v] = load(operands + v * kLanes);
            running.add_step(w, values);
            operands += kOperands;
            values += kHeight;
          }
        }
        add_scaled<Terms, kHeight>(running, scales, of_run, first && group == 0 && done == 0, sums + lane);
      }
    }
  }
}

}  // namespace llmc
