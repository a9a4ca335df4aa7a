// The inner loop of products of blocked formats with tokens in int8 that have a scale for each 32 k: short groups whose
// lengths the compiler knows.
//
// Codes are read in units of 32 k as they are stored (rows are multiples of these), and multiplied byte by byte as soon
// as planes are joined in registers. The sums of a group are scaled and added up in the order of multiply_codes.
#pragma once
#include "code_planes.h"

namespace llmc {

// Tokens as IntegerProduct packs them, four codes to a register on every processor.
template <class Codes>
struct UnitProduct {
  using X = int32_t;
  static constexpr int kXPerWord = Codes::kCodes / 4;
  static constexpr int kXPerRun = 3;
  static constexpr int64_t kRunWords = kTokenGroup / Codes::kCodes;
  static constexpr bool kDecodes = false;
};

// A blocked format's codes in planes of kLow bits and of kMore above them, or kTable: places in a table; kJoined: bytes
// already.
template <int kLow, int kMore, int kGroup, bool kMinima, bool kTable = false, bool kJoined = false>
struct UnitCodes {
  static constexpr int kQuads = kGroup / 4;                             // of a group
  static constexpr int kGroups = static_cast<int>(kTokenGroup) / kGroup;  // of a unit
  static constexpr bool kHasMinima = kMinima, kIsTable = kTable;
  static constexpr bool kHasPlanes = kTable || kLow + kMore != 4;
  static constexpr int64_t kUnitBytes = (kJoined ? 8 : kLow + kMore) * LLMC_PANEL * 4;
  static constexpr int kHeaderFloats = LLMC_PANEL * (kMinima ? 2 : 1);  // of a group, decoded
  static constexpr int kXPerGroup = 3 + kQuads;                         // of a token, packed
  static constexpr int kGreatest = (1 << (kLow + kMore)) - 1;
  // Whether a format with these codes may have such steps (with_steps): groups of 32 may also have a float each.
  template <int kBits, int kLeast>
  static constexpr bool has_steps() {
    if (kGroup == 32) return kBits == 0 || (kBits == 6 && kLeast == (kTable ? -32 : 0));
    if (kLow + kMore == 2) return kBits == 4;
    return kLow + kMore == 3 ? kBits == 6 && kLeast == -32 : kBits == 8;
  }
  using Joined = UnitCodes<kLow, kMore, kGroup, kMinima, kTable, true>;

  // Four codes of each row from `lane` on: the i-th of the unit.
  static VecBits quad(const uint8_t* unit, int i, int lane) {
    const auto word = [&](int at) {
      VecBits bits;
      std::memcpy(&bits, unit + (at * LLMC_PANEL + lane) * 4, sizeof bits);
      return bits;
    };
    if constexpr (kJoined)
      return word(i);
    else
      return joined<kLow, kMore, kTable>(word, i);
  }
};

// Whether add_quads takes the zero off a table's bytes itself.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr bool kTakesZeros = true;
#else
constexpr bool kTakesZeros = false;
#endif

// The first value of the sums of a group. less_zeros: minus a token's sum of codes, times the zero of all weights.
template <class Codes>
inline VecInt first_dots(int32_t less_zeros) {
  return VecInt{} + (kTakesZeros && Codes::kIsTable ? 0 : less_zeros);
}

// sums[t][v] += the products of kQuads quads, from the first-th of the unit on, with x[quad][token].
template <class Codes, int kHeight, int kVecs>
inline __attribute__((always_inline)) void add_quads(const uint8_t* unit, int first, int lane, const int32_t* x,
                                                     VecInt (&sums)[kHeight][kVecs]) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  // Adds up sums of two products in 16 bits while they fit. A table's bytes must have signs for a single sum to fit.
  constexpr int kTogether = Codes::kIsTable ? 1 : std::min(Codes::kQuads, 32767 / (2 * 127 * Codes::kGreatest));
#pragma GCC unroll 8
  for (int quad = 0; quad < Codes::kQuads; quad += kTogether) {
    VecShorts shorts[kHeight][kVecs];
#pragma GCC unroll 8
    for (int i = quad; i < quad + kTogether; i++)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; v++) {
        const VecBits codes = Codes::quad(unit, first + i, lane + v * kLanes);
#pragma GCC unroll 8
        for (int t = 0; t < kHeight; t++) {
          const VecInt step = VecInt{} + x[i * kHeight + t];
          const VecShorts products =
              Codes::kIsTable ? sums_of_signed_bytes(codes ^ 0x80808080u, step) : sums_of_bytes(codes, step);
          shorts[t][v] = i == quad ? products : shorts[t][v] + products;
          keep_order(shorts[t][v]);
        }
      }
#pragma GCC unroll 8
    for (int t = 0; t < kHeight; t++)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; v++) sums[t][v] += sums_of_shorts(shorts[t][v], VecShorts{} + 1);
  }
#else
#pragma GCC unroll 8
  for (int i = 0; i < Codes::kQuads; i++)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; v++) {
      const VecBits codes = Codes::quad(unit, first + i, lane + v * kLanes);
#pragma GCC unroll 8
      for (int t = 0; t < kHeight; t++) IntegerSteps<8>::add_products(sums[t][v], codes, VecInt{} + x[i * kHeight + t]);
    }
#endif
}

// Adds a block to sums [kHeight][LLMC_PANEL], or sets them if `first`. The block's headers are decoded.
template <class Codes, int kHeight>
void multiply_units(const CodeBlock& block, const int32_t* x, float* sums, bool first, FetchCodes fetch) {
  constexpr int kVecs = kCodeVecs;
  using Terms = IntegerTerms<true>;
  for (int lane = 0; lane < LLMC_PANEL; lane += kVecs * kLanes) {
    const int32_t* values = x;
    const uint8_t* unit = block.codes;
    const float* header = reinterpret_cast<const float*>(block.header) + lane;
    for (int64_t group = 0; group < block.groups; group += Codes::kGroups, unit += Codes::kUnitBytes) {
      fetch.all();
#pragma GCC unroll 2
      for (int i = 0; i < Codes::kGroups; i++, header += Codes::kHeaderFloats) {
        const int32_t* of_run = values;
        values += 3 * kHeight;
        VecInt dots[kHeight][kVecs];
#pragma GCC unroll 8
        for (int t = 0; t < kHeight; t++)
#pragma GCC unroll 4
          for (int v = 0; v < kVecs; v++) dots[t][v] = first_dots<Codes>(of_run[t]);
        add_quads<Codes>(unit, i * Codes::kQuads, lane, values, dots);
        values += Codes::kQuads * kHeight;
        const bool set = first && group + i == 0;
#pragma GCC unroll 8
        for (int t = 0; t < kHeight; t++) {
          const Vec scale = broadcast(Terms::scale<kHeight>(of_run, t));
          const Vec less = broadcast(Terms::less<kHeight>(of_run, t));
#pragma GCC unroll 4
          for (int v = 0; v < kVecs; v++) {
            float* sum = sums + t * LLMC_PANEL + lane + v * kLanes;
            Vec before = set ? Vec{} : load(sum);
            if constexpr (Codes::kHasMinima) before = fma(load(header + LLMC_PANEL + v * kLanes), less, before);
            const Vec dot = __builtin_convertvector(dots[t][v], Vec);
            store(sum, fma(dot, load(header + v * kLanes) * scale, before));
          }
        }
      }
    }
  }
}

// Calls body(codes) for a blocked format.
template <class Body>
inline void with_units(const CodeRecord& record, const Body& body) {
  switch (record.stored_bits) {
    case 2:
      return body(UnitCodes<2, 0, 16, true>{});
    case 3:
      return body(UnitCodes<2, 1, 16, false>{});
    case 4:
      if (record.is_table) return body(UnitCodes<4, 0, 32, false, true>{});
      return body(UnitCodes<4, 0, 32, true>{});
    case 5:
      return body(UnitCodes<4, 1, 32, true>{});
    default:
      return body(UnitCodes<4, 2, 16, false>{});
  }
}

}  // namespace llmc
