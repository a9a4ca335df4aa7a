// Products of many tokens' int8 codes with weight codes in the processor's tile registers.
//
// The integer sums of a group are exact and are scaled and added up as multiply_codes does it: a token has the same
// bits whichever of the two multiplied it.
#pragma once
#include "code_products.h"
#include "tile_registers.h"

#if defined(__AMX_INT8__)
namespace llmc {

// The fewest tokens for which tiles are used; below this, vectors are equally fast.
constexpr int64_t kLeastTiled = 12;
// The fewest words (of four codes of a group) for which a tile is faster than vectors.
constexpr int64_t kLeastTileWords = 8;

// The number of words per tile: a divisor of `words`.
inline int64_t tile_words(int64_t words) {
  int64_t most = std::min(words, kTileRows);
  while (words % most != 0) most--;
  return most;
}

// For each group: minus the sum of each token's codes (times the usual zero where all weights have that), then
// [words at a time][token][word] of four codes.
template <class Codes>
struct TiledProduct {
  using X = int32_t;
  static constexpr int kXPerWord = Codes::kCodes / 4;
  static constexpr int kXPerRun = 1;
  static constexpr int64_t kRunWords = 1 << 20;
  static constexpr bool kDecodes = false;
};

// One token's values of one group, or part of one.
template <class Codes>
inline void pack_group(TiledProduct<Codes>, const CodePanels& panels, const float* values, int64_t words, int64_t height,
                       int64_t token, const float*, int32_t* to) {
  const int64_t quads = words * TiledProduct<Codes>::kXPerWord, at_a_time = tile_words(quads);
  VecInt sum = {};
  for (int64_t quad = 0; quad < quads; quad += at_a_time) {
    int32_t* row = to + height + quad * height + token * at_a_time;
    for (int64_t i = 0; i < at_a_time; i += kLanes / 4) {
      const int64_t count = std::min<int64_t>(kLanes / 4, at_a_time - i);
      const VecInt codes = nearest_integer(load(values + 4 * (quad + i), 4 * count));
      sum += codes;
      int32_t bytes[kLanes / 4];
      pack_bytes(codes, bytes);
      std::memcpy(row + i, bytes, static_cast<size_t>(count) * sizeof(int32_t));
    }
  }
  int32_t total = 0;
  for (int i = 0; i < kLanes; i++) total += sum[i];
  to[token] = panels.has_zeros ? -total : -total * panels.usual_zero();
}

// The 4-bit codes of a block as bytes: to[group][word of four codes][lane].
inline void widen_codes(const CodeBlock& block, uint8_t* to) {
  for (int64_t group = 0; group < block.groups; group++) {
    const uint8_t* from = block.codes + group * block.group_bytes;
    for (int64_t word = 0; word < block.words; word++, from += kTileWeightBytes, to += 2 * kTileWeightBytes)
      for (int64_t lane = 0; lane < LLMC_PANEL; lane += kLanes) {
        VecBits codes;
        std::memcpy(&codes, from + lane * 4, sizeof codes);
        const VecBits low = codes & 0x0f0f0f0fu, high = codes >> 4 & 0x0f0f0f0fu;
        std::memcpy(to + lane * 4, &low, sizeof low);
        std::memcpy(to + kTileWeightBytes + lane * 4, &high, sizeof high);
      }
  }
}

// Weights of a block in the layout of tiles: bytes, `words` of four in each group, groups group_bytes apart.
struct TileCodes {
  const uint8_t* bytes;
  int64_t group_bytes, words, at_a_time;
};

// Scales the sums of a group [height][LLMC_PANEL] and adds them to `sums`, or sets those.
inline void add_scaled_tile(const CodeBlock& block, const uint8_t* header, const int32_t* dots, const int32_t* x_sums,
                            int64_t height, bool set, float* sums) {
  for (int lane = 0; lane < LLMC_PANEL; lane += kLanes) {
    const CodePanels& panels = block.panels;
    const Vec scales = block.scales(header, lane);
    const VecInt zeros = panels.has_zeros ? load_zeros(panels, header, lane) : VecInt{} + 1;
    for (int64_t t = 0; t < height; t++) {
      VecInt dot;
      std::memcpy(&dot, dots + t * LLMC_PANEL + lane, sizeof dot);
      dot += panels.has_zeros ? x_sums[t] * zeros : VecInt{} + x_sums[t];
      float* sum = sums + t * LLMC_PANEL + lane;
      store(sum, fma(__builtin_convertvector(dot, Vec), scales, set ? Vec{} : load(sum)));
    }
  }
}

// Adds a block to sums [height][LLMC_PANEL], or sets them if `first`; fetches what is wanted next meanwhile.
template <bool kTwo>
void multiply_tile_codes(TileRegisters& registers, const CodeBlock& block, const TileCodes& weight, const int32_t* x,
                         int64_t height, float* sums, bool first, FetchCodes fetch) {
  alignas(64) int32_t dots[kTileTokens * LLMC_PANEL];
  registers.shape(height, weight.at_a_time);
  for (int64_t group = 0; group < block.groups; group++) {
    const int32_t* x_sums = x;
    const uint8_t* bytes = weight.bytes + group * weight.group_bytes;
    x += height;
    zero_sums<kTwo>();
    for (int64_t word = 0; word < weight.words; word += weight.at_a_time) {
      fetch.all();
      add_dots<ByteDots, kTwo>(x, bytes, weight.at_a_time);
      bytes += weight.at_a_time * kTileWeightBytes;
      x += weight.at_a_time * height;
    }
    store_sums<kTwo>(dots);
    const uint8_t* header = block.header + group * block.header_bytes;
    add_scaled_tile(block, header, dots, x_sums, height, first && group == 0, sums);
  }
}

}  // namespace llmc
#endif
