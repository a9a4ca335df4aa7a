// The tile registers of AMX: eight matrices of up to 16 rows of 64 bytes, and what multiplies two of them.
//
// A thread shapes them before use. Tiles 0 to 3 hold sums, of 16 + 16 tokens by 16 + 16 lanes; 4 and 5 the tokens' x,
// 6 and 7 the lanes' weights. Source: Intel, "Architecture Instruction Set Extensions Programming Reference", ch. 3.
#pragma once
#include <cstdint>
#include <cstring>

#include "api.h"

#if defined(__AMX_TILE__)
#include <immintrin.h>

namespace llmc {

constexpr bool kHasTiles = true;
constexpr int64_t kTileRows = 16;
// Tokens that are multiplied at a time.
constexpr int kTileTokens = 2 * kTileRows;
// Bytes of a tile's row of weights: one word of each lane of a panel.
constexpr int64_t kTileWeightBytes = LLMC_PANEL * 4;

// A compiler barrier: tiles are loaded from memory that was written with another type.
inline void publish_to_tiles() { asm volatile("" ::: "memory"); }

// The shape of one thread's tiles, which outlives no loop.
class TileRegisters {
 public:
  TileRegisters() = default;
  ~TileRegisters() {
    if (height_ != 0) _tile_release();
  }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

  // Shapes the tiles for `height` tokens (at most 32) and `words` words of four bytes of k (at most 16). Clears the
  // tiles.
  void shape(int64_t height, int64_t words) {
    if (height == height_ && words == words_) return;
    height_ = height;
    words_ = words;
    Shape shape = {};
    shape.palette = 1;
    for (int i = 0; i < 2; i++) {
      const auto rows = static_cast<uint8_t>(i == 0 ? (height < kTileRows ? height : kTileRows) : height - kTileRows);
      const bool used = i == 0 || height > kTileRows;
      for (int sums = 2 * i; sums < 2 * i + 2; sums++) set(shape, sums, used ? rows : uint8_t{0}, used ? 64 : 0);
      set(shape, 4 + i, used ? rows : uint8_t{0}, used ? static_cast<uint16_t>(4 * words) : uint16_t{0});
      set(shape, 6 + i, static_cast<uint8_t>(words), 64);
    }
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }

 private:
  struct alignas(64) Shape {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static void set(Shape& shape, int tile, uint8_t rows, uint16_t row_bytes) {
    shape.rows[tile] = rows;
    shape.row_bytes[tile] = row_bytes;
  }

  int64_t height_ = 0, words_ = 0;
};

// Products of two bf16, summed in fp32; of four signed and unsigned bytes, summed in 32 bits.
struct Bf16Dots {
  template <bool kTwo>
  static inline __attribute__((always_inline)) void add() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwo) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
};

struct ByteDots {
  template <bool kTwo>
  static inline __attribute__((always_inline)) void add() {
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    if constexpr (kTwo) {
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
  }
};

template <bool kTwo>
inline __attribute__((always_inline)) void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

// sums: [tokens][LLMC_PANEL] of four bytes.
template <bool kTwo>
inline __attribute__((always_inline)) void load_sums(const void* sums) {
  constexpr int64_t kRow = LLMC_PANEL * 4;
  const auto* from = static_cast<const char*>(sums);
  _tile_loadd(0, from, kRow);
  _tile_loadd(1, from + 64, kRow);
  if constexpr (kTwo) {
    _tile_loadd(2, from + kTileRows * kRow, kRow);
    _tile_loadd(3, from + kTileRows * kRow + 64, kRow);
  }
}

template <bool kTwo>
inline __attribute__((always_inline)) void store_sums(void* sums) {
  constexpr int64_t kRow = LLMC_PANEL * 4;
  auto* to = static_cast<char*>(sums);
  _tile_stored(0, to, kRow);
  _tile_stored(1, to + 64, kRow);
  if constexpr (kTwo) {
    _tile_stored(2, to + kTileRows * kRow, kRow);
    _tile_stored(3, to + kTileRows * kRow + 64, kRow);
  }
}

// sums += x · weight for `words` words of k. x: [token][words]; weight: [words][LLMC_PANEL].
template <class Dots, bool kTwo>
inline __attribute__((always_inline)) void add_dots(const void* x, const void* weight, int64_t words) {
  const auto* of_x = static_cast<const char*>(x);
  const auto* of_weight = static_cast<const char*>(weight);
  _tile_loadd(6, of_weight, kTileWeightBytes);
  _tile_loadd(4, of_x, 4 * words);
  _tile_loadd(7, of_weight + 64, kTileWeightBytes);
  if constexpr (kTwo) _tile_loadd(5, of_x + kTileRows * 4 * words, 4 * words);
  Dots::template add<kTwo>();
}

}  // namespace llmc
#else
namespace llmc {
constexpr bool kHasTiles = false;
}
#endif
