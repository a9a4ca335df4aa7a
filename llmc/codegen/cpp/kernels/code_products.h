// The inner loop of products with quantized weights: sums[t][lane] (+)= Σ_k x[t][k] · weight[lane][k] for a tile of
// tokens, codes being decoded in registers.
//
// The codes of a group are summed up apart (as integers if x is int8 too), then scaled and added to the sums in fp32,
// groups in ascending order. Where the order of a sum shows in its bits, it does not depend on the height of the tile.
#pragma once
#include "attention_products.h"
#include "code_panels.h"

namespace llmc {

constexpr int kCodeVecs = 2;  // vectors of lanes at a time
// The tallest tile. With AVX-512 eight tokens run at 88% of the VNNI peak; twelve would need every register, and GCC
// spills (60%).
constexpr int kCodeTokens = kLanes == 16 ? 8 : 4;

// Some groups' codes in one panel: of each group a header and `words` words of codes.
struct CodeBlock {
  const CodePanels& panels;
  const uint8_t* header;
  const uint8_t* codes;
  int64_t groups, words;
};

// ---- int8 x ----------------------------------------------------------------------------------------------------
#if defined(__AVX512VNNI__)
// sum + Σ of four products of unsigned codes and of x. As an instruction: with the intrinsic GCC 12 copies the
// accumulators of a loop around, which costs a tenth of the speed.
template <int kBits>
inline void add_products(VecInt& sum, VecBits codes, VecInt x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
}
#elif defined(__AVX2__)
#if defined(__AVX512BW__)
typedef __m512i Register;
inline Register multiply_bytes(Register codes, Register x) { return _mm512_maddubs_epi16(codes, x); }
inline Register multiply_shorts(Register a, int b) { return _mm512_madd_epi16(a, _mm512_set1_epi16(b)); }
#else
typedef __m256i Register;
inline Register multiply_bytes(Register codes, Register x) { return _mm256_maddubs_epi16(codes, x); }
inline Register multiply_shorts(Register a, int b) { return _mm256_madd_epi16(a, _mm256_set1_epi16(b)); }
#endif
// Pairs of products are summed in 16 bits, which saturate: 8-bit codes go as two halves.
template <int kBits>
inline void add_products(VecInt& sum, VecBits codes, VecInt x) {
  const auto halves = [&](VecBits half, int factor) {
    const Register products = multiply_bytes(reinterpret_cast<Register>(half), reinterpret_cast<Register>(x));
    sum += reinterpret_cast<VecInt>(multiply_shorts(products, factor));
  };
  if constexpr (kBits == 4) {
    halves(codes, 1);
  } else {
    halves(codes & 0x0f0f0f0fu, 1);
    halves(codes >> 4 & 0x0f0f0f0fu, 16);
  }
}
#else
template <int kBits>
inline void add_products(VecInt& sum, VecBits codes, VecInt x) {
  for (int i = 0; i < 4; i++) sum += reinterpret_cast<VecInt>(codes >> (8 * i) & 255u) * (x << (24 - 8 * i) >> 24);
}
#endif

// x in int8. Packed, for each group: minus the sum of each token's codes, which multiplied by the zero is what unsigned
// codes add too much (multiplied already where all weights have the usual zero); then for each four k every token's
// four codes.
template <class Codes>
struct IntegerProduct {
  using X = int32_t;
  static constexpr int kBits = 32 / Codes::kCodes;
  static constexpr int kXPerWord = Codes::kCodes / 4;
  static constexpr int kXPerRun = 1;  // the sum
  static constexpr int64_t kRunWords = 1 << 20;

  template <int kHeight>
  struct Running {
    VecInt sums[kHeight][kCodeVecs];

    __attribute__((always_inline)) Running(bool has_zeros, const VecInt (&zeros)[kCodeVecs], const X* x) {
#pragma GCC unroll 8
      for (int t = 0; t < kHeight; t++)
#pragma GCC unroll 2
        for (int v = 0; v < kCodeVecs; v++) sums[t][v] = VecInt{} + x[t];
      if (!has_zeros) return;
#pragma GCC unroll 8
      for (int t = 0; t < kHeight; t++)
#pragma GCC unroll 2
        for (int v = 0; v < kCodeVecs; v++) sums[t][v] *= zeros[v];
    }
    __attribute__((always_inline)) void add(const VecBits (&words)[kCodeVecs], const VecInt (&)[kCodeVecs],
                                            const X* x) {
#pragma GCC unroll 2
      for (int i = 0; i < kXPerWord; i++) {
        VecBits codes[kCodeVecs];
#pragma GCC unroll 2
        for (int v = 0; v < kCodeVecs; v++) codes[v] = kBits == 8 ? words[v] : words[v] >> (4 * i) & 0x0f0f0f0fu;
#pragma GCC unroll 8
        for (int t = 0; t < kHeight; t++) {
          const VecInt quad = VecInt{} + x[i * kHeight + t];
#pragma GCC unroll 2
          for (int v = 0; v < kCodeVecs; v++) add_products<kBits>(sums[t][v], codes[v], quad);
        }
      }
    }
    Vec value(int t, int v) const { return __builtin_convertvector(sums[t][v], Vec); }
  };
};

// ---- x as it is ------------------------------------------------------------------------------------------------
// How the codes of a word become operands: kSteps of them, the i-th from the places low(i) and, in pairs, high(i).
template <class Codes>
struct FloatOperands {
  using Steps = FloatSteps;
  static constexpr int kSteps = Codes::kCodes;
  static constexpr int low(int i) { return Codes::order(i); }
  static constexpr int high(int) { return 0; }
  static Vec operand(VecBits word, int i, VecInt zero) { return Codes::value(word, i, zero); }
};

#if defined(__AVX512BF16__)
// Pairs of bf16, in which 8-bit codes and small integers are exact.
template <class Codes>
struct PairOperands {
  using Steps = PairSteps;
  static constexpr int kSteps = Codes::kCodes / 2;
  static constexpr int low(int i) { return Codes::order(2 * i); }
  static constexpr int high(int i) { return Codes::order(2 * i + 1); }
  static Vec operand(VecBits word, int i, VecInt zero) {
    const VecBits even = bits_of(Codes::value(word, 2 * i, zero)), odd = bits_of(Codes::value(word, 2 * i + 1, zero));
    return from_bits(even >> 16 | odd);
  }
};

// 32 numbers in bf16, all of which must be exact.
struct PairTable {
  alignas(64) uint16_t values[32];
  Vec operator()(VecBits index) const {
    const __m512i at = reinterpret_cast<__m512i>(index), table = _mm512_load_si512(values);
    return reinterpret_cast<Vec>(_mm512_maskz_permutexvar_epi16(~__mmask32{0}, at, table));
  }
};

constexpr uint16_t bf16_bits(int halves) {  // of halves / 2, |halves| < 256
  if (halves == 0) return 0;
  const int magnitude = halves < 0 ? -halves : halves;
  int exponent = 0;
  while (magnitude >> (exponent + 1) != 0) exponent++;
  const int mantissa = (magnitude << (7 - exponent)) & 127;
  return static_cast<uint16_t>((halves < 0 ? 0x8000 : 0) | (exponent + 126) << 7 | mantissa);
}

constexpr PairTable int4_table() {  // code - zero, from -16 on
  PairTable table{};
  for (int i = 0; i < 32; i++) table.values[i] = bf16_bits(2 * (i - 16));
  return table;
}

constexpr PairTable twice(const float* values) {  // so that a fifth bit does not matter
  PairTable table{};
  for (int i = 0; i < 32; i++) table.values[i] = bf16_bits(static_cast<int>(2 * values[i % 16]));
  return table;
}

constexpr PairTable e4m3_table() {  // below 2^-6: multiples of 2^-9
  PairTable table{};
  for (int i = 1; i < 8; i++) table.values[i] = static_cast<uint16_t>(bf16_bits(2 * i) - (9 << 7));
  return table;
}

// Codes of both halves of a word at once: those at places i and i + 4.
template <>
struct PairOperands<Int4Codes> {
  using Steps = PairSteps;
  static constexpr int kSteps = 4;
  static constexpr int low(int i) { return kNibbleOrder[i]; }
  static constexpr int high(int i) { return kNibbleOrder[i + 4]; }
  static Vec operand(VecBits word, int i, VecInt zero) {
    static constexpr PairTable kTable = int4_table();
    const VecBits first = reinterpret_cast<VecBits>((16 - zero) * 0x10001);
    return kTable((word >> (4 * i) & 0x000f000fu) + first);
  }
};

template <const float (&kValues)[16]>
struct PairOperands<TableCodes<kValues>> {
  using Steps = PairSteps;
  static constexpr int kSteps = 4;
  static constexpr int low(int i) { return kNibbleOrder[i]; }
  static constexpr int high(int i) { return kNibbleOrder[i + 4]; }
  static Vec operand(VecBits word, int i, VecInt) {
    static constexpr PairTable kTable = twice(kValues);
    return kTable(word >> (4 * i));
  }
};

// The exponents differ by 120; what has none comes from a table.
template <>
struct PairOperands<Fp8Codes> {
  using Steps = PairSteps;
  static constexpr int kSteps = 2;
  static constexpr int low(int i) { return i; }
  static constexpr int high(int i) { return i + 2; }
  static Vec operand(VecBits word, int i, VecInt) {
    static constexpr PairTable kTable = e4m3_table();
    const VecBits codes = word >> (8 * i), magnitudes = codes & 0x007f007fu;
    const VecBits normal = (magnitudes << 4) + (120u << 7) * 0x10001u;
    const __mmask32 small = _mm512_cmplt_epu16_mask(reinterpret_cast<__m512i>(magnitudes), _mm512_set1_epi16(8));
    const __m512i values = _mm512_mask_permutexvar_epi16(
        reinterpret_cast<__m512i>(normal), small, reinterpret_cast<__m512i>(magnitudes), _mm512_load_si512(kTable.values));
    return from_bits(reinterpret_cast<VecBits>(values) | (codes & 0x00800080u) << 8);
  }
};
#endif

// x in fp32 or bf16, packed: for each operand of a word, every token's step.
template <class Operands>
struct FloatProduct {
  using Steps = typename Operands::Steps;
  using X = typename Steps::Step;
  static constexpr int kXPerWord = Operands::kSteps;
  static constexpr int kXPerRun = 0;
  // One chain of dependent sums is 32 k long: those of neighbouring runs then overlap, which is all that keeps the
  // multipliers busy with one token.
  static constexpr int64_t kRunWords = 32 / (Operands::kSteps * Steps::kWidth);

  template <int kHeight>
  struct Running {
    Vec sums[kHeight][kCodeVecs] = {};

    __attribute__((always_inline)) Running(bool, const VecInt (&)[kCodeVecs], const X*) {}
    __attribute__((always_inline)) void add(const VecBits (&words)[kCodeVecs], const VecInt (&zeros)[kCodeVecs],
                                            const X* x) {
#pragma GCC unroll 8
      for (int i = 0; i < kXPerWord; i++) {
        Vec w[kCodeVecs];
#pragma GCC unroll 2
        for (int v = 0; v < kCodeVecs; v++) w[v] = Operands::operand(words[v], i, zeros[v]);
#pragma GCC unroll 8
        for (int t = 0; t < kHeight; t++)
#pragma GCC unroll 2
          for (int v = 0; v < kCodeVecs; v++) sums[t][v] = Steps::multiply_add(x[i * kHeight + t], w[v], sums[t][v]);
      }
    }
    Vec value(int t, int v) const { return sums[t][v]; }
  };
};

// ---- the loop --------------------------------------------------------------------------------------------------
// Adds a block to sums [kHeight][LLMC_PANEL], or sets them if `first`. Meanwhile fetches what is wanted next into
// cache, two lines at a time: with one token 42 instead of 37 GB/s on one Zen 5 core.
template <class Product, int kHeight>
void multiply_codes(const CodeBlock& block, const typename Product::X* x, float* sums, bool first,
                    const uint8_t* next, int64_t next_stride) {
  constexpr int64_t kRow = LLMC_PANEL * 4;
  const CodePanels& panels = block.panels;
  const int64_t next_header = panels.group_bytes();
  for (int lane = 0; lane < LLMC_PANEL; lane += kCodeVecs * kLanes) {
    const auto* values = x;
    const uint8_t* header = block.header;
    const uint8_t* word = block.codes + lane * 4;
    for (int64_t group = 0; group < block.groups; group++) {
      Vec scales[kCodeVecs];
      VecInt zeros[kCodeVecs];
#pragma GCC unroll 2
      for (int v = 0; v < kCodeVecs; v++) {
        scales[v] = load_scales(header, panels.scale_type, lane + v * kLanes);
        zeros[v] = load_zeros(panels, header, lane + v * kLanes);
      }
      for (int64_t done = 0; done < block.words; done += Product::kRunWords) {
        typename Product::template Running<kHeight> running(panels.has_zeros, zeros, values);
        values += Product::kXPerRun * kHeight;
        const int64_t count = std::min(Product::kRunWords, block.words - done);
        for (int64_t i = 0; i < count; i++) {
          __builtin_prefetch(next);
          __builtin_prefetch(next + 64);
          next += next_stride;
          VecBits words[kCodeVecs];
#pragma GCC unroll 2
          for (int v = 0; v < kCodeVecs; v++) std::memcpy(&words[v], word + v * kLanes * 4, sizeof words[v]);
          running.add(words, zeros, values);
          word += kRow;
          values += Product::kXPerWord * kHeight;
        }
        const bool set = first && group == 0 && done == 0;
#pragma GCC unroll 8
        for (int t = 0; t < kHeight; t++)
#pragma GCC unroll 2
          for (int v = 0; v < kCodeVecs; v++) {
            float* sum = sums + t * LLMC_PANEL + lane + v * kLanes;
            store(sum, fma(running.value(t, v), scales[v], set ? Vec{} : load(sum)));
          }
      }
      header += next_header;
      word += panels.header_bytes();
    }
  }
}

}  // namespace llmc
