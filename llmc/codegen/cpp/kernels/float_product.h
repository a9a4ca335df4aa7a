// Products of weight codes with x in fp32 or bf16, codes being decoded in registers.
#pragma once
#include "attention_products.h"
#include "code_panels.h"

namespace llmc {

// How the codes of a word become operands: kSteps of them, the i-th from the places low(i) and, in pairs, high(i).
template <class Codes>
struct FloatOperands {
  using Steps = FloatSteps;
  static constexpr bool kReadsSparse = std::is_same_v<Codes, Int8Codes>;
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
  static constexpr bool kReadsSparse = std::is_same_v<Codes, Int8Codes>;
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

template <class BitsOf>
constexpr PairTable pair_table(const BitsOf& bits_of) {
  PairTable table{};
  for (int i = 0; i < 32; i++) table.values[i] = bits_of(i);
  return table;
}

// Codes of both halves of a word at once: those at places i and i + 4.
struct NibblePairs {
  static constexpr bool kReadsSparse = false;
  using Steps = PairSteps;
  static constexpr int kSteps = 4;
  static constexpr int low(int i) { return kNibbleOrder[i]; }
  static constexpr int high(int i) { return kNibbleOrder[i + 4]; }
};

template <>
struct PairOperands<Int4Codes> : NibblePairs {
  static Vec operand(VecBits word, int i, VecInt zero) {
    // code - zero, from -16 on
    static constexpr PairTable kTable = pair_table([](int i) { return bf16_bits(2 * (i - 16)); });
    const VecBits first = reinterpret_cast<VecBits>((16 - zero) * 0x10001);
    return kTable((word >> (4 * i) & 0x000f000fu) + first);
  }
};

template <const float (&kValues)[16]>
struct PairOperands<TableCodes<kValues>> : NibblePairs {
  static Vec operand(VecBits word, int i, VecInt) {
    // Twice, so that a fifth bit does not matter.
    static constexpr PairTable kTable =
        pair_table([](int i) { return bf16_bits(static_cast<int>(2 * kValues[i % 16])); });
    return kTable(word >> (4 * i));
  }
};

// The exponents differ by 120; what has none comes from a table.
template <>
struct PairOperands<Fp8Codes> {
  static constexpr bool kReadsSparse = false;
  using Steps = PairSteps;
  static constexpr int kSteps = 2;
  static constexpr int low(int i) { return i; }
  static constexpr int high(int i) { return i + 2; }
  static Vec operand(VecBits word, int i, VecInt) {
    // Below 2^-6: multiples of 2^-9.
    static constexpr PairTable kTable = pair_table(
        [](int i) { return static_cast<uint16_t>(i == 0 || i > 7 ? 0 : bf16_bits(2 * i) - (9 << 7)); });
    const VecBits codes = word >> (8 * i), magnitudes = codes & 0x007f007fu;
    const VecBits normal = (magnitudes << 4) + (120u << 7) * 0x10001u;
    const __mmask32 small = _mm512_cmplt_epu16_mask(reinterpret_cast<__m512i>(magnitudes), _mm512_set1_epi16(8));
    const __m512i values = _mm512_mask_permutexvar_epi16(
        reinterpret_cast<__m512i>(normal), small, reinterpret_cast<__m512i>(magnitudes), _mm512_load_si512(kTable.values));
    return from_bits(reinterpret_cast<VecBits>(values) | (codes & 0x00800080u) << 8);
  }
};
#endif

// One chain of dependent sums is 32 k long: those of neighbouring runs then overlap, which is all that keeps the
// multipliers busy with one token.
constexpr int64_t kRunSteps = 32;

// The sums of one run.
template <class Steps, int kHeight>
struct FloatSums {
  Vec sums[kHeight][kCodeVecs] = {};

  __attribute__((always_inline)) void add_step(const Vec (&w)[kCodeVecs], const typename Steps::Step* x) {
#pragma GCC unroll 16
    for (int t = 0; t < kHeight; t++)
#pragma GCC unroll 2
      for (int v = 0; v < kCodeVecs; v++) sums[t][v] = Steps::multiply_add(x[t], w[v], sums[t][v]);
  }
  Vec value(int t, int v) const { return sums[t][v]; }
};

// The values packed before the steps of a run: if weights have minima, the negated sum of each token's values.
template <class Step, bool kMinimum>
struct FloatTerms {
  using X = Step;
  static constexpr bool kHasScale = false, kHasMinimum = kMinimum;
  static constexpr int kXPerRun = kMinimum ? 1 : 0;
  template <int kHeight>
  static float less(const X* x, int t) {
    float sum;
    std::memcpy(&sum, x + t, sizeof sum);
    return sum;
  }
};

// x in fp32 or bf16, packed: for each operand of a word, every token's step. A group with a minimum is one run.
template <class Operands, bool kMinimum = false>
struct FloatProduct {
  using Steps = typename Operands::Steps;
  using X = typename Steps::Step;
  using Terms = FloatTerms<X, kMinimum>;
  static constexpr int kXPerWord = Operands::kSteps;
  static constexpr bool kDecodes = std::is_same_v<Steps, FloatSteps>;  // a block for all tiles, where these are several
  static constexpr int kXPerRun = Terms::kXPerRun;
  static constexpr int kWords = 1;
  static constexpr bool kReadsSparse = Operands::kReadsSparse;
  static constexpr int64_t kRunWords = kRunSteps / (Operands::kSteps * Steps::kWidth);

  template <int kHeight>
  struct Running : FloatSums<Steps, kHeight> {
    __attribute__((always_inline)) Running(bool, const VecInt (&)[kCodeVecs], const X*) {}
    __attribute__((always_inline)) void add(const VecBits (&words)[1][kCodeVecs], const VecInt (&zeros)[kCodeVecs],
                                            const X* x) {
#pragma GCC unroll 8
      for (int i = 0; i < kXPerWord; i++) {
        Vec w[kCodeVecs];
#pragma GCC unroll 2
        for (int v = 0; v < kCodeVecs; v++) w[v] = Operands::operand(words[0][v], i, zeros[v]);
        this->add_step(w, x + i * kHeight);
      }
    }
  };

  // The operands of a word of each vector: to[step][vector][lane].
  static void operands(const VecBits (&words)[1][kCodeVecs], const VecInt (&zeros)[kCodeVecs], float* to) {
#pragma GCC unroll 8
    for (int i = 0; i < kXPerWord; i++)
#pragma GCC unroll 2
      for (int v = 0; v < kCodeVecs; v++, to += kLanes) store(to, Operands::operand(words[0][v], i, zeros[v]));
  }
};

}  // namespace llmc
