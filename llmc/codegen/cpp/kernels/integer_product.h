// Products of weight codes with x in int8, summed up as integers: exact, so that their order is free.
//
// Codes are unsigned (api.h). The sum of a token's codes times the weight's zero is subtracted to compensate for the
// offset.
#pragma once
#include "code_panels.h"

namespace llmc {

inline void pack_bytes(VecInt codes, int32_t* to) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  const Bytes bytes = __builtin_convertvector(codes, Bytes);
  std::memcpy(to, &bytes, sizeof bytes);
}

// Four codes of a token in one X.
struct ByteSteps {
  static constexpr int kXPerQuad = 1;
  static void pack(VecInt codes, int32_t* to) { pack_bytes(codes, to); }
};

// A word of codes as kSteps registers of operands, the i-th codes(word, i), each of which goes with one X of a token.
// pack: kXPerQuad of those for each four codes. kWords: words that are best done at once.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
typedef int16_t VecShorts __attribute__((vector_size(kLanes * 4)));
// The sums of two neighbouring products.
#if defined(__AVX512BW__)
inline VecInt sums_of_shorts(VecShorts a, VecShorts b) {
  return reinterpret_cast<VecInt>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
inline VecShorts sums_of_bytes(VecBits codes, VecInt x) {
  const __m512i sums = _mm512_maddubs_epi16(reinterpret_cast<__m512i>(codes), reinterpret_cast<__m512i>(x));
  return reinterpret_cast<VecShorts>(sums);
}
#else
inline VecInt sums_of_shorts(VecShorts a, VecShorts b) {
  return reinterpret_cast<VecInt>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
inline VecShorts sums_of_bytes(VecBits codes, VecInt x) {
  const __m256i sums = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(codes), reinterpret_cast<__m256i>(x));
  return reinterpret_cast<VecShorts>(sums);
}
#endif

// The same where codes have signs, both from -127 to 127.
#if defined(__AVX512BW__)
inline VecShorts sums_of_signed_bytes(VecBits codes, VecInt x) {
  const __m512i all = reinterpret_cast<__m512i>(codes), zero = _mm512_setzero_si512();
  const __mmask64 negative = _mm512_movepi8_mask(reinterpret_cast<__m512i>(x));
  return sums_of_bytes(reinterpret_cast<VecBits>(_mm512_abs_epi8(reinterpret_cast<__m512i>(x))),
                       reinterpret_cast<VecInt>(_mm512_mask_sub_epi8(all, negative, zero, all)));
}
#else
inline VecShorts sums_of_signed_bytes(VecBits codes, VecInt x) {
  const __m256i all = reinterpret_cast<__m256i>(codes), of_x = reinterpret_cast<__m256i>(x);
  return sums_of_bytes(reinterpret_cast<VecBits>(_mm256_abs_epi8(of_x)),
                       reinterpret_cast<VecInt>(_mm256_sign_epi8(all, of_x)));
}
#endif

// GCC would first compute all products that are added up, which takes more registers than there are.
inline __attribute__((always_inline)) void keep_order(VecShorts& sum) { asm("" : "+v"(sum)); }

template <int kBits>
struct IntegerSteps;

// In 16 bits each: sums of two products of 8-bit codes would not fit there.
template <>
struct IntegerSteps<8> {
  static constexpr int kSteps = 2, kWords = 1, kXPerQuad = 2;
  // The first with the third, the second with the fourth.
  static void pack(VecInt codes, int32_t* to) {
    for (int i = 0; i < kLanes; i += 4, to += 2) {
      to[0] = (codes[i] & 0xffff) | codes[i + 2] << 16;
      to[1] = (codes[i + 1] & 0xffff) | codes[i + 3] << 16;
    }
  }
  static VecBits codes(VecBits word, int i) { return word >> (8 * i) & 0x00ff00ffu; }
  static void add_products(VecInt& sum, VecBits codes, VecInt x) {
    sum += sums_of_shorts(reinterpret_cast<VecShorts>(codes), reinterpret_cast<VecShorts>(x));
  }
};

// Eight sums of two products of 4-bit codes, 2 · 15 · 127 at most, still fit into 16 bits.
template <>
struct IntegerSteps<4> {
  static constexpr int kSteps = 2, kWords = kLanes == 16 ? 4 : 2, kXPerQuad = 1;
  static void pack(VecInt codes, int32_t* to) { pack_bytes(codes, to); }
  static VecBits codes(VecBits word, int i) { return word >> (4 * i) & 0x0f0f0f0fu; }
  // All tokens of a tile, one step after the other: each token's sum waits for the one of the step before.
  template <int kHeight, int kCount>
  __attribute__((always_inline)) static void add_products(VecInt (&sums)[kHeight][kCodeVecs], int v,
                                                          const VecBits (&words)[kCount][kCodeVecs], const int32_t* x) {
    static_assert(kCount * kSteps <= 8);
    VecShorts shorts[kHeight];
#pragma GCC unroll 8
    for (int i = 0; i < kCount * kSteps; i++) {
      const VecBits step = codes(words[i / kSteps][v], i % kSteps);
#pragma GCC unroll 16
      for (int t = 0; t < kHeight; t++) {
        const VecShorts products = sums_of_bytes(step, VecInt{} + x[i * kHeight + t]);
        shorts[t] = i == 0 ? products : shorts[t] + products;
        keep_order(shorts[t]);
      }
    }
#pragma GCC unroll 16
    for (int t = 0; t < kHeight; t++) sums[t][v] += sums_of_shorts(shorts[t], VecShorts{} + 1);
  }
};
#else
template <int kBits>
struct IntegerSteps {
  static constexpr int kSteps = 8 / kBits, kWords = 1, kXPerQuad = 1;
  static void pack(VecInt codes, int32_t* to) { pack_bytes(codes, to); }
  static VecBits codes(VecBits word, int i) { return kBits == 8 ? word : word >> (4 * i) & 0x0f0f0f0fu; }
  static void add_products(VecInt& sum, VecBits codes, VecInt x) {
#if defined(__AVX512VNNI__)
    // As an instruction: with the intrinsic GCC 12 copies the accumulators of a loop around, which costs a tenth of the
    // speed.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
#else
    for (int i = 0; i < 4; i++) sum += reinterpret_cast<VecInt>(codes >> (8 * i) & 255u) * (x << (24 - 8 * i) >> 24);
#endif
  }
};
#endif

// k whose channels of a token share a scale, where tokens are rounded by groups: TOKEN_GROUP of formats/code_format.py.
constexpr int64_t kTokenGroup = 32;

// The values packed after the initial sum of a run: the scale of each token's run, if runs have their own scales, and
// the negated sum of its values, if weights have minima.
template <bool kByRuns>
struct IntegerTerms {
  using X = int32_t;
  static constexpr bool kHasScale = kByRuns, kHasMinimum = kByRuns;
  template <int kHeight>
  static float scale(const X* x, int t) {
    return number(x[kHeight + t]);
  }
  template <int kHeight>
  static float less(const X* x, int t) {
    return number(x[2 * kHeight + t]);
  }

 private:
  static float number(X bits) { return from_bits(static_cast<uint32_t>(bits)); }
};

// Packed, for each run: minus the sum of each token's codes (times the zero already where all weights have the usual
// one) and IntegerTerms; then for each step every token's codes. A run is a group; or, kByRuns, at most kTokenGroup k
// of one, for tokens or weights that are more than a scale.
template <class Codes, bool kByRuns = false>
struct IntegerProduct {
  using Terms = IntegerTerms<kByRuns>;
  static constexpr int kBits = 32 / Codes::kCodes;
  using Steps = IntegerSteps<kBits>;
  using X = int32_t;
  static constexpr int kXPerWord = Steps::kSteps;
  static constexpr bool kDecodes = false;
  static constexpr int kXPerRun = kByRuns ? 3 : 1;
  static constexpr int64_t kRunWords = kByRuns ? kTokenGroup / Codes::kCodes : 1 << 20;
  static constexpr int kWords = Steps::kWords;
  static constexpr bool kReadsSparse = kBits == 8;

  template <int kHeight>
  struct Running {
    VecInt sums[kHeight][kCodeVecs];

    __attribute__((always_inline)) Running(bool has_zeros, const VecInt (&zeros)[kCodeVecs], const X* x) {
#pragma GCC unroll 16
      for (int t = 0; t < kHeight; t++)
#pragma GCC unroll 2
        for (int v = 0; v < kCodeVecs; v++) sums[t][v] = VecInt{} + x[t];
      if (!has_zeros) return;
#pragma GCC unroll 16
      for (int t = 0; t < kHeight; t++)
#pragma GCC unroll 2
        for (int v = 0; v < kCodeVecs; v++) sums[t][v] *= zeros[v];
    }
    template <int kCount>
    __attribute__((always_inline)) void add(const VecBits (&words)[kCount][kCodeVecs], const VecInt (&)[kCodeVecs],
                                            const X* x) {
      if constexpr (kWords == 1) {
#pragma GCC unroll 2
        for (int i = 0; i < kXPerWord; i++) {
          VecBits codes[kCodeVecs];
#pragma GCC unroll 2
          for (int v = 0; v < kCodeVecs; v++) codes[v] = Steps::codes(words[0][v], i);
#pragma GCC unroll 16
          for (int t = 0; t < kHeight; t++) {
            const VecInt step = VecInt{} + x[i * kHeight + t];
#pragma GCC unroll 2
            for (int v = 0; v < kCodeVecs; v++) Steps::add_products(sums[t][v], codes[v], step);
          }
        }
      } else {
#pragma GCC unroll 2
        for (int v = 0; v < kCodeVecs; v++) {
          // Else GCC keeps the broadcast x of the first vector for the second one, in memory.
          asm("" : "+r"(x));
          Steps::add_products(sums, v, words, x);
        }
      }
    }
    Vec value(int t, int v) const { return __builtin_convertvector(sums[t][v], Vec); }
  };
};

}  // namespace llmc
