// Matrix products with quantized weights: packing x into tiles, and a block of codes times all tiles.
//
// See quantized_runs.h for how threads share panels, code_products.h for the inner loop, and linear.h for the code
// shared with plain weights.
#pragma once
#include "linear.h"
#include "tile_codes.h"
#include "unit_panel.h"

// The products of LlmcLinear with weight[o, k] = (code - zero) · scale (llmc::quantized_linear, quantized_gated_linear,
// quantized_lm_head).
typedef struct {
  int64_t tokens, in, out, group;
  LlmcRows x;
  const void* weight;    // code panels
  const float* x_scale;  // [1], static; or null: a scale for each token
  const float* bias;
  LlmcRows residual;
  LlmcRows y;
  int32_t activation;
  float scale;
  int32_t format;      // LlmcCodes
  int32_t x_format;    // LlmcXCodes
  int32_t x_group;     // channels of a token that share a scale, kTokenGroup; 0 for all
  int32_t scale_type;  // LlmcScales
  int32_t has_zeros;
  int32_t is_sparse;  // sparse code panels
  const int32_t* index;  // of experts, as in LlmcLinear
  int32_t* pairs;
  int64_t slots, x_slots, experts;
  LlmcRows delta;  // of adapters, as in LlmcLinear
  const int32_t* adapters;
} LlmcQuantizedLinear;

namespace llmc {

// A run of k: whole groups, or a part of one.
struct Part {
  int64_t k, count, groups;
};

// The parts of `in`, each as large as a block of codes at most. They depend on the weight only.
inline Part part_from(const CodePanels& panels, int64_t k) {
  const int64_t longest = kCodeBlockBytes * 8 / (LLMC_PANEL * panels.bits);
  const int64_t left = panels.in - k;
  if (panels.group >= longest) return {k, std::min({longest, panels.group - k % panels.group, left}), 1};
  const int64_t groups = std::min(longest / panels.group, left / panels.group);
  return {k, groups * panels.group, groups};
}

inline CodeBlock block_of(const CodePanels& panels, int64_t panel, const Part& part) {
  const uint8_t *header = panels.header(panel, part.k), *codes = panels.codes(panel, part.k);
  const int64_t count = part.count / part.groups, stride = panels.group_bytes();
  const LlmcScales type = panels.scale_type;
  // The next block is assumed to be as large as this one.
  const uint8_t* next;
  int64_t bytes;
  if (panels.is_blocked()) {
    // All headers of a panel come before its codes: each block prefetches its share of the next panel's headers.
    const int64_t of_codes = panels.stored_words(part.count) * LLMC_PANEL * 4;
    next = codes + of_codes + (header - panels.header(panel, 0));
    bytes = of_codes + (part.count + panels.run - 1) / panels.run * panels.header_bytes();
  } else {
    bytes = part.groups > 1 ? part.groups * stride : panels.stored_words(count) * LLMC_PANEL * 4;
    next = codes + bytes;
  }
  return {panels, header, codes, part.groups, panels.words(count), stride, stride, next, bytes, type};
}

// The block of a weight stored without zeros. codes: where its codes are expanded to. The next block is assumed to have
// the same number of nonzero codes as this one.
inline CodeBlock sparse_block(const CodePanels& panels, const SparsePanels& sparse, int64_t panel, const Part& part,
                              const SparseCursor& cursor, uint8_t* codes) {
  const int64_t words = panels.words(part.count / part.groups), row = LLMC_PANEL * 4;
  const uint8_t* header = sparse.header(panel) + part.k / panels.group * panels.scale_bytes;
  const int64_t bytes = part.groups * words * row;
  const uint8_t* next = cursor.value + bytes;
  const LlmcScales type = panels.scale_type;
  return {panels, header, codes, part.groups, words, panels.scale_bytes, words * row, next, bytes / 2, type};
}

#if defined(__AMX_INT8__)
// Whether all parts can be taken in tiles of a useful size.
template <class Codes>
inline bool fits_tiles(const CodePanels& panels) {
  for (int64_t k = 0; k < panels.in;) {
    const Part part = part_from(panels, k);
    const int64_t words = panels.words(part.count / part.groups) * TiledProduct<Codes>::kXPerWord;
    if (tile_words(words) < kLeastTileWords) return false;
    k += part.count;
  }
  return true;
}
#endif

// ---- packing x -------------------------------------------------------------------------------------------------
// Packs one token's values of one run to to[i · height]. scale: their scale, if runs have their own scales. If the
// length of the run is not a multiple of 16, zeros must follow.
template <class Steps, bool kByRuns>
inline void pack_integers(const CodePanels& panels, const float* values, int64_t quads, int64_t height, int64_t token,
                          float scale, int32_t* to) {
  constexpr int64_t kTerms = kByRuns ? 3 : 1;
  to += token;
  VecInt sum = {};
  for (int64_t i = 0; i < quads; i += kLanes / 4) {
    const VecInt codes = nearest_integer(load(values + 4 * i));
    sum += codes;
    int32_t steps[Steps::kXPerQuad * kLanes / 4];
    Steps::pack(codes, steps);
    const int64_t count = Steps::kXPerQuad * std::min<int64_t>(kLanes / 4, quads - i);
    for (int64_t j = 0; j < count; j++) to[(kTerms + Steps::kXPerQuad * i + j) * height] = steps[j];
  }
  int32_t total = 0;
  for (int i = 0; i < kLanes; i++) total += sum[i];
  to[0] = panels.has_zeros ? -total : -total * panels.usual_zero();
  if constexpr (kByRuns) {
    to[height] = static_cast<int32_t>(to_bits(scale));
    to[2 * height] = static_cast<int32_t>(to_bits(scale * static_cast<float>(-total)));
  }
}

template <class Codes, bool kByRuns>
inline void pack_run(IntegerProduct<Codes, kByRuns>, const CodePanels& panels, const float* values, int64_t words,
                     int64_t height, int64_t token, float scale, int32_t* to) {
  using Steps = typename IntegerProduct<Codes, kByRuns>::Steps;
  pack_integers<Steps, kByRuns>(panels, values, words * Codes::kCodes / 4, height, token, scale, to);
}

template <class Codes>
inline void pack_run(UnitProduct<Codes>, const CodePanels& panels, const float* values, int64_t words, int64_t height,
                     int64_t token, float scale, int32_t* to) {
  pack_integers<ByteSteps, true>(panels, values, words * Codes::kCodes / 4, height, token, scale, to);
}

template <class Operands, bool kMinimum>
inline void pack_run(FloatProduct<Operands, kMinimum>, const CodePanels&, const float* values, int64_t words,
                     int64_t height, int64_t token, float, typename FloatProduct<Operands>::X* to) {
  using Steps = typename Operands::Steps;
  to += token;
  constexpr int kCodes = Operands::kSteps * Steps::kWidth;
  if constexpr (kMinimum) {
    float less = 0.0f;
    for (int64_t i = 0; i < words * kCodes; i++) less -= values[i];
    std::memcpy(to, &less, sizeof less);
    to += height;
  }
  for (int64_t word = 0; word < words; word++)
    for (int i = 0; i < Operands::kSteps; i++, to += height) {
      const float low = values[word * kCodes + Operands::low(i)];
      if constexpr (Steps::kWidth == 1)
        *to = low;
      else  // both are bf16 already
        *to = to_bits(low) >> 16 | to_bits(values[word * kCodes + Operands::high(i)]);
    }
}

// One token's values of one group, or part of one. scales: of each kTokenGroup of them, or null.
template <class Product>
inline void pack_group(Product product, const CodePanels& panels, const float* values, int64_t words, int64_t height,
                       int64_t token, const float* scales, typename Product::X* to) {
  // Without terms, runs have nothing in front.
  const int64_t at_a_time = Product::kXPerRun == 0 ? words : Product::kRunWords;
  for (int64_t done = 0; done < words; done += at_a_time) {
    const int64_t count = std::min(at_a_time, words - done), k = done * 32 / panels.bits;
    const float scale = scales == nullptr ? 1.0f : scales[k / kTokenGroup];
    pack_run(product, panels, values + k, count, height, token, scale, to);
    to += (Product::kXPerRun + count * Product::kXPerWord) * height;
  }
}

// The values of x divided by its scale and rounded to `format`, in fp32; pack_group rounds integers.
template <class T>
inline void round_values(const T* x, int64_t count, const TokenScale& scale, LlmcXCodes format, float* values) {
  const float largest = largest_code(format);
  for_vectors(count, [&](int64_t c, auto lanes) {
    Vec v = load(x + c, lanes);
    if (format != LLMC_X_NONE) v = saturated(v * scale.inverse, largest);
    if (format == LLMC_X_FP8) v = nearest_e4m3(v);
    store(values + c, v);
  });
}

// x packed in tiles. The tiles of one part lie together: that is the order in which they are read.
template <class Product>
struct PackedX {
  using X = typename Product::X;
  const CodePanels& panels;
  const Tiles& tiles;
  int64_t tokens;
  float* scales;  // [tokens]
  X* data;

  int64_t group_size(int64_t k) const {
    const int64_t words = panels.words(k), runs = (words + Product::kRunWords - 1) / Product::kRunWords;
    return runs * Product::kXPerRun + words * Product::kXPerWord;
  }
  int64_t part_size(const Part& part) const { return part.groups * group_size(part.count / part.groups); }
  // The packed size of a token: the sum over all parts.
  int64_t token_size() const {
    int64_t size = 0;
    for (int64_t k = 0; k < panels.in;) {
      const Part part = part_from(panels, k);
      size += part_size(part);
      k += part.count;
    }
    return size;
  }

  // start: of the product's tokens, the first that is packed.
  template <class T>
  void pack(const LlmcQuantizedLinear& a, int64_t start, int64_t tile) const {
    constexpr int64_t kPadding = kLanes + 8;
    constexpr int64_t kMost = kCodeBlockBytes * 8 / (LLMC_PANEL * 4);
    float values[kMost + kPadding], run_scales[kMost / kTokenGroup];
    const int64_t first = tiles.start(tile), height = tiles.height_of(tile);
    for (int64_t t = 0; t < height; t++) {
      const T* row = x_row<T>(a, start + first + t);
      const auto format = static_cast<LlmcXCodes>(a.x_format);
      const bool by_groups = a.x_group != 0;
      const TokenScale scale =
          format == LLMC_X_NONE || by_groups ? TokenScale{1.0f, 1.0f} : token_scale(row, panels.in, a.x_scale, format);
      scales[first + t] = scale.scale;
      X* of_part = data;
      for (int64_t k = 0; k < panels.in;) {
        const Part part = part_from(panels, k);
        const int64_t count = part.count / part.groups;
        X* to = of_part + part_size(part) * first;
        if (!by_groups) round_values(row + k, part.count, scale, format, values);
        for (int64_t c = 0; by_groups && c < part.count; c += kTokenGroup) {
          const int64_t count = std::min(kTokenGroup, part.count - c);
          const TokenScale of_group = token_scale(row + k + c, count, nullptr, format);
          run_scales[c / kTokenGroup] = of_group.scale;
          round_values(row + k + c, count, of_group, format, values + c);
        }
        std::fill_n(values + part.count, kPadding, 0.0f);
        for (int64_t group = 0; group < part.groups; group++) {
          const float* of_group = by_groups ? run_scales + group * count / kTokenGroup : nullptr;
          pack_group(Product{}, panels, values + group * count, panels.words(count), height, t, of_group, to);
          to += group_size(count) * height;
        }
        of_part += part_size(part) * tokens;
        k += part.count;
      }
    }
  }
};

// ---- the product -----------------------------------------------------------------------------------------------
// The smallest tile height for more than kCodeTokens tokens, which are split into few tiles.
constexpr int kLeastDecoded = (kDecodedTokens + 1) / 2;

// Adds a block of codes to the sums of all tiles of tokens.
template <class Product>
struct BlockProduct {
  using X = typename Product::X;
  const Tiles& tiles;
  bool decodes;
  float* operands;  // of a block, where it is decoded first
  static constexpr bool kIsTiled = false, kTakesOne = false;
  static constexpr auto kHeights = std::make_integer_sequence<int, kCodeTokens>();

  static int64_t tallest(bool decodes) { return decodes ? kDecodedTokens : kCodeTokens; }  // of tiles

#if defined(__AVX512VBMI2__)
  static constexpr bool kReadsSparse = Product::kReadsSparse;
  // Where a block is decoded for all tiles, it is expanded before.
  bool expands_on_the_way() const { return !decodes; }

  // For a block that the first tile expands to `codes` while it multiplies.
  void operator()(const CodeBlock& block, SparseCursor& cursor, uint8_t* codes, const X* values, int64_t values_per_token,
                  float* sums, bool first) const {
    static constexpr auto kMultiply =
        by_height<1>(kHeights, [](auto height) { return &multiply_sparse_codes<Product, height, false>; });
    static constexpr auto kMultiplyAndKeep =
        by_height<1>(kHeights, [](auto height) { return &multiply_sparse_codes<Product, height, true>; });
    const auto multiply = (tiles.count == 1 ? kMultiply : kMultiplyAndKeep)[tiles.height_of(0) - 1];
    cursor = multiply(block, cursor, codes, values, sums, first);
    (*this)(block, values, values_per_token, sums, first, 1);
  }
#else
  static constexpr bool kReadsSparse = false;
#endif

  // from: the first tile that is multiplied.
  void operator()(const CodeBlock& block, const X* values, int64_t values_per_token, float* sums, bool first,
                  int64_t from = 0) const {
    const int64_t words = block.groups * block.words;
    constexpr int64_t kPasses = LLMC_PANEL / (kCodeVecs * kLanes);
    // Runs `multiply` for each tile; each tile prefetches `fetches` times.
    const auto for_tiles = [&](int64_t fetches, const auto& multiply) {
      FetchCodes fetch = fetch_after(block, tiles.tokens(), tiles.count, fetches);
      for (int64_t tile = from; tile < tiles.count; tile++) {
        const int64_t start = tiles.start(tile);
        multiply(tiles.height_of(tile), values + values_per_token * start, sums + start * LLMC_PANEL, fetch);
        fetch.next += fetches * fetch.stride;
      }
    };
    if constexpr (Product::kDecodes) {
      static constexpr auto kMultiply =
          by_height<kLeastDecoded>(std::make_integer_sequence<int, kDecodedTokens - kLeastDecoded + 1>(),
                                   [](auto height) { return &multiply_decoded<typename Product::Terms, height>; });
      if (decodes) {
        decode<Product>(block, operands);
        const int64_t steps = block.words * Product::kXPerWord;
        for_tiles(block.groups * steps / kDecodedSteps * kPasses,
                  [&](int64_t height, const X* x, float* to, const FetchCodes& fetch) {
                    kMultiply[height - kLeastDecoded](block, steps, operands, x, to, first, fetch);
                  });
        return;
      }
    }
    static constexpr auto kMultiply =
        by_height<1>(kHeights, [](auto height) { return &multiply_codes<Product, height>; });
    for_tiles(words * kPasses, [&](int64_t height, const X* x, float* to, const FetchCodes& fetch) {
      kMultiply[height - 1](block, x, to, first, fetch);
    });
  }
};

template <class Codes>
struct BlockProduct<UnitProduct<Codes>> {
  const Tiles& tiles;
  bool decodes;
  float* operands;
  static constexpr bool kReadsSparse = false, kIsTiled = false, kTakesOne = true;

  static int64_t tallest(bool) { return kCodeTokens; }

  // For one token: a whole panel, whose planes are joined in registers.
  static void multiply_one(const CodePanels& panels, int64_t panel, const int32_t* values, float* sums) {
    with_units(panels.record, [&](auto codes) {
      with_steps(panels.record, [&](auto bits, auto least) {
        using Units = decltype(codes);
        if constexpr (Units::template has_steps<bits, least>())
          multiply_panel<Units, bits, least>(panels, panel, values, sums);
      });
    });
  }

  // For more tokens, for which planes are joined once.
  void operator()(const CodeBlock& block, const int32_t* values, int64_t values_per_token, float* sums,
                  bool first) const {
    with_units(block.panels.record, [&](auto codes) {
      using Units = decltype(codes);
      using Multiplied = std::conditional_t<Units::kHasPlanes, typename Units::Joined, Units>;
      multiply<Multiplied>(block, values, values_per_token, sums, first);
    });
  }

 private:
  template <class Units>
  void multiply(const CodeBlock& block, const int32_t* values, int64_t values_per_token, float* sums, bool first) const {
    constexpr int64_t kPasses = LLMC_PANEL / (kCodeVecs * kLanes);
    constexpr int kLeast = 2;
    static constexpr auto kMultiply = by_height<kLeast>(std::make_integer_sequence<int, kCodeTokens - kLeast + 1>(),
                                                        [](auto height) { return &multiply_units<Units, height>; });
    const int64_t fetches = kPasses * block.groups / Units::kGroups;
    for (int64_t tile = 0; tile < tiles.count; tile++) {
      const int64_t start = tiles.start(tile), height = tiles.height_of(tile);
      FetchCodes fetch = fetch_after(block, tiles.tokens(), tiles.count, fetches);
      fetch.next += tile * fetches * fetch.stride;
      kMultiply[height - kLeast](block, values + values_per_token * start, sums + start * LLMC_PANEL, first, fetch);
    }
  }
};

#if defined(__AMX_INT8__)
template <class Codes>
struct BlockProduct<TiledProduct<Codes>> {
  const Tiles& tiles;
  bool decodes;
  float* operands;  // bytes of a block of 4-bit codes
  static constexpr bool kReadsSparse = false, kIsTiled = true, kTakesOne = false;
  TileRegisters registers{};

  static int64_t tallest(bool) { return kTileTokens; }

  void operator()(const CodeBlock& block, const int32_t* values, int64_t values_per_token, float* sums, bool first) {
    const int64_t words = block.words * TiledProduct<Codes>::kXPerWord, at_a_time = tile_words(words);
    TileCodes weight{block.codes, block.group_bytes, words, at_a_time};
    if constexpr (Codes::kCodes == 8) {
      auto* bytes = reinterpret_cast<uint8_t*>(operands);
      widen_codes(block, bytes);
      weight = {bytes, words * kTileWeightBytes, words, at_a_time};
    }
    publish_to_tiles();
    const int64_t fetches = block.groups * words / at_a_time;
    FetchCodes fetch{block.next, (block.bytes / fetches + tiles.count - 1) / tiles.count};
    for (int64_t tile = 0; tile < tiles.count; tile++) {
      const int64_t height = tiles.height_of(tile);
      const auto multiply = height > kTileRows ? multiply_tile_codes<true> : multiply_tile_codes<false>;
      multiply(registers, block, weight, values, height, sums + tiles.start(tile) * LLMC_PANEL, first, fetch);
      values += values_per_token * height;
      fetch.next += fetches * fetch.stride;
    }
  }
};
#endif

}  // namespace llmc
