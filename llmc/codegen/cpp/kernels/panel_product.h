// The inner loop of all matrix products: sums[t][lane] (+)= Σ_k x[t][k] · panel[k][lane] for a tile of tokens.
//
// x is packed: for each k (each pair of k for bf16 weights) the values of the tile's tokens side by side. Every sum
// is one chain over k in ascending order, whatever the height of the tile, so a token's result does not depend on
// which tokens it is computed with. The running sums are kept in memory between blocks of k, unrounded.
#pragma once
#include <array>
#include <utility>

#include "api.h"
#include "tile_registers.h"
#include "vector.h"

namespace llmc {

// How x is packed and tiled for weights of type T. kStep: how many k a weight row covers; kXPerStep: packed values of
// one token in it. kTokens: the tallest tile; kVecs: vectors of lanes at a time; the sums then fill the registers.
template <class T>
struct PanelProduct;

#if defined(__AMX_BF16__)
template <>
struct PanelProduct<bf16> {
  using X = uint32_t;  // a pair of bf16
  static constexpr int kStep = 2, kXPerStep = 1, kTokens = kTileTokens;
};
#elif defined(__AVX512BF16__)
// One step of every token of a tile: pairs of weights, of some vectors of lanes, with a pair of x each.
template <int kHeight, int kVecs>
inline __attribute__((always_inline)) void add_pairs(Vec (&sums)[kHeight][kVecs], const __m512i (&w)[kVecs],
                                                     const uint32_t* x) {
#pragma GCC unroll 32
  for (int t = 0; t < kHeight; t++) {
    const __m512bh pair = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(x[t])));
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; v++) sums[t][v] = _mm512_dpbf16_ps(sums[t][v], reinterpret_cast<__m512bh>(w[v]), pair);
  }
}

template <>
struct PanelProduct<bf16> {
  using X = uint32_t;  // a pair of bf16
  static constexpr int kStep = 2, kXPerStep = 1, kTokens = 14, kVecs = 2;

  template <int kHeight>
  static inline __attribute__((always_inline)) void step(Vec (&sums)[kHeight][kVecs], const bf16* weight, const X* x) {
    __m512i w[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; v++) w[v] = _mm512_loadu_si512(weight + v * 2 * kLanes);
    add_pairs<kHeight>(sums, w, x);
  }
};
#else
template <>
struct PanelProduct<bf16> {
  using X = float;
  static constexpr int kStep = 2, kXPerStep = 2, kVecs = 2;
  static constexpr int kTokens = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;

  template <int kHeight>
  static inline __attribute__((always_inline)) void step(Vec (&sums)[kHeight][kVecs], const bf16* weight, const X* x) {
    Vec even[kVecs], odd[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; v++) {
      VecBits pairs;
      std::memcpy(&pairs, weight + v * 2 * kLanes, sizeof pairs);
      even[v] = from_bits(pairs << 16);
      odd[v] = from_bits(pairs & 0xffff0000u);
    }
#pragma GCC unroll 16
    for (int t = 0; t < kHeight; t++)
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; v++) sums[t][v] = fma(even[v], broadcast(x[t]), sums[t][v]);
#pragma GCC unroll 16
    for (int t = 0; t < kHeight; t++)
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; v++) sums[t][v] = fma(odd[v], broadcast(x[kHeight + t]), sums[t][v]);
  }
};
#endif

template <>
struct PanelProduct<float> {
  using X = float;
  static constexpr int kStep = 1, kXPerStep = 1, kVecs = 2;
  static constexpr int kTokens = kLanes == 16 ? 14 : kLanes == 8 ? 6 : 4;

  template <int kHeight>
  static inline __attribute__((always_inline)) void step(Vec (&sums)[kHeight][kVecs], const float* weight, const X* x) {
    Vec w[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; v++) w[v] = load(weight + v * kLanes);
#pragma GCC unroll 16
    for (int t = 0; t < kHeight; t++) {
      const Vec value = broadcast(x[t]);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; v++) sums[t][v] = fma(w[v], value, sums[t][v]);
    }
  }
};

// Adds `steps` steps of k to sums [kHeight][LLMC_PANEL], or sets them if `first`. Meanwhile fetches the weights that
// are wanted next into cache: two lines at `next`, which moves on by next_stride elements a step. With 16 tokens that
// takes a third off the time, because memory is then read at an even pace and not only by the first tile of a block.
template <class T, int kHeight>
void multiply_panel(const T* weight, const typename PanelProduct<T>::X* x, int64_t steps, float* sums, bool first,
                    const T* next, int64_t next_stride) {
  using Product = PanelProduct<T>;
  constexpr int kVecs = Product::kVecs;
  for (int lane = 0; lane < LLMC_PANEL; lane += kVecs * kLanes) {
    Vec running[kHeight][kVecs];
#pragma GCC unroll 16
    for (int t = 0; t < kHeight; t++)
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; v++) running[t][v] = first ? Vec{} : load(sums + t * LLMC_PANEL + lane + v * kLanes);
    const T* w = weight + lane * Product::kStep;
    const auto* values = x;
    for (int64_t s = 0; s < steps; s++) {
      __builtin_prefetch(next);
      __builtin_prefetch(next + 64 / sizeof(T));
      next += next_stride;
      Product::template step<kHeight>(running, w, values);
      w += LLMC_PANEL * Product::kStep;
      values += kHeight * Product::kXPerStep;
    }
#pragma GCC unroll 16
    for (int t = 0; t < kHeight; t++)
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; v++) store(sums + t * LLMC_PANEL + lane + v * kLanes, running[t][v]);
  }
}

// Functions for tiles of each height from kLeast on, which of(height) has as a constant.
template <int kLeast, int... kMore, class Of>
constexpr auto by_height(std::integer_sequence<int, kMore...>, const Of& of) {
  return std::array{of(std::integral_constant<int, kLeast + kMore>{})...};
}

// multiply_panel for tiles of any height, by one thread in one loop.
template <class T>
class TileProduct {
 public:
  void operator()(int64_t height, const T* weight, const typename PanelProduct<T>::X* x, int64_t steps, float* sums,
                  bool first, const T* next, int64_t next_stride) {
    static constexpr auto kMultiply = by_height<1>(std::make_integer_sequence<int, PanelProduct<T>::kTokens>(),
                                                   [](auto height) { return &multiply_panel<T, height>; });
    kMultiply[height - 1](weight, x, steps, sums, first, next, next_stride);
  }
};

#if defined(__AMX_BF16__)
// In the processor's tile registers. x: [16 steps][token][step], and what steps are left over likewise.
template <>
class TileProduct<bf16> {
 public:
  void operator()(int64_t height, const bf16* weight, const uint32_t* x, int64_t steps, float* sums, bool first,
                  const bf16* next, int64_t next_stride) {
    publish_to_tiles();
    const auto add = height > kTileRows ? &TileProduct::add<true> : &TileProduct::add<false>;
    const int64_t whole = steps / kTileRows * kTileRows;
    if (whole > 0) (this->*add)(height, weight, x, whole, kTileRows, sums, first, next, next_stride);
    if (whole == steps) return;
    weight += whole * LLMC_PANEL * 2;
    (this->*add)(height, weight, x + whole * height, steps - whole, steps - whole, sums, first && whole == 0,
                 next + whole * next_stride, next_stride);
  }

 private:
  template <bool kTwo>
  void add(int64_t height, const bf16* weight, const uint32_t* x, int64_t steps, int64_t at_a_time, float* sums,
           bool first, const bf16* next, int64_t next_stride) {
    registers_.shape(height, at_a_time);
    first ? zero_sums<kTwo>() : load_sums<kTwo>(sums);
    for (int64_t step = 0; step < steps; step += at_a_time) {
      for (const bf16* end = next + at_a_time * next_stride; next < end; next += 64 / sizeof(bf16)) __builtin_prefetch(next);
      add_dots<Bf16Dots, kTwo>(x, weight, at_a_time);
      weight += at_a_time * LLMC_PANEL * 2;
      x += at_a_time * height;
    }
    store_sums<kTwo>(sums);
  }

  TileRegisters registers_;
};
#endif

}  // namespace llmc
