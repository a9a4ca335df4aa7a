// How quantized weights lie in memory (kernels/api.h describes it) and what their codes stand for.
#pragma once
#include <algorithm>

#include "api.h"
#include "sparse_panels.h"
#include "token_codes.h"

namespace llmc {

constexpr int kCodeVecs = 2;  // vectors of lanes that products take at a time

// ---- where things lie ------------------------------------------------------------------------------------------
constexpr int64_t kStoredBits[] = {8, 4, 8, 4, 4, 5, 6};  // of a code, in the order of LlmcCodes

// The panels of one weight. A part is a run of k inside one group. Products take codes of 4 or of 8 bits: what is
// stored in planes (code_planes.h) is joined to 8 first.
struct CodePanels {
  const uint8_t* data;
  int64_t in, group, stored_bits, bits, scale_bytes;
  LlmcScales scale_type;
  bool has_zeros, is_sparse;

  template <class Arguments>
  explicit CodePanels(const Arguments& a, int64_t in)
      : data(static_cast<const uint8_t*>(a.weight)),
        in(in),
        group(a.group),
        stored_bits(kStoredBits[a.format]),
        bits(stored_bits > 4 ? 8 : 4),
        scale_bytes(LLMC_PANEL * (a.scale_type == LLMC_SCALES_F32 ? 4 : 2)),
        scale_type(static_cast<LlmcScales>(a.scale_type)),
        has_zeros(a.has_zeros != 0),
        is_sparse(a.is_sparse != 0) {}

  bool in_planes() const { return stored_bits != bits; }
  int32_t usual_zero() const { return 1 << (stored_bits - 1); }
  int64_t words(int64_t k) const { return (k * bits + 31) / 32; }
  int64_t stored_words(int64_t k) const { return in_planes() ? (k + 31) / 32 * stored_bits : words(k); }
  int64_t header_bytes() const { return scale_bytes + (has_zeros ? LLMC_PANEL * 2 : 0); }
  int64_t group_bytes() const { return header_bytes() + stored_words(group) * LLMC_PANEL * 4; }
  int64_t panel_bytes() const { return in / group * group_bytes(); }
  // Without their zeros, which symmetric codes of 8 bits alone may be.
  SparsePanels sparse(int64_t panels) const {
    return {data, panels, in / group * words(group) * (LLMC_PANEL * 4 / 64), in / group * scale_bytes};
  }
  const uint8_t* header(int64_t panel, int64_t k) const {
    return data + panel * panel_bytes() + k / group * group_bytes();
  }
  // k: a multiple of 8, or of 32 in planes.
  const uint8_t* codes(int64_t panel, int64_t k) const {
    return header(panel, k) + header_bytes() + stored_words(k % group) * LLMC_PANEL * 4;
  }
};

// ---- scales and zeros of one group -----------------------------------------------------------------------------
inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  return from_bits(sign | to_bits(from_bits(magnitude << 13) * 0x1p112f));
}

inline Vec load_halves(const uint8_t* from) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Vec x;
  for (int i = 0; i < kLanes; i++) {
    uint16_t half;
    std::memcpy(&half, from + 2 * i, sizeof half);
    x[i] = half_to_float(half);
  }
  return x;
#endif
}

// Of kLanes rows from `lane` on.
inline Vec load_scales(const uint8_t* header, LlmcScales type, int lane) {
  switch (type) {
    case LLMC_SCALES_F32:
      return load(reinterpret_cast<const float*>(header) + lane);
    case LLMC_SCALES_F16:
      return load_halves(header + 2 * lane);
    case LLMC_SCALES_BF16:
      break;
  }
  return load(reinterpret_cast<const bf16*>(header) + lane);
}

inline VecInt load_zeros(const CodePanels& panels, const uint8_t* header, int lane) {
  if (!panels.has_zeros) return VecInt{} + panels.usual_zero();
  typedef int16_t Shorts __attribute__((vector_size(kLanes * 2)));
  Shorts zeros;
  std::memcpy(&zeros, header + panels.scale_bytes + 2 * lane, sizeof zeros);
  return __builtin_convertvector(zeros, VecInt);
}

// ---- values of codes -------------------------------------------------------------------------------------------
// Source: Dettmers et al. 2023, "QLoRA"; Open Compute Project, "Microscaling formats (MX) specification" 1.0.
alignas(64) constexpr float kNf4[16] = {-1.0f,
                                        -0.6961928009986877f,
                                        -0.5250730514526367f,
                                        -0.39491748809814453f,
                                        -0.28444138169288635f,
                                        -0.18477343022823334f,
                                        -0.09105003625154495f,
                                        0.0f,
                                        0.07958029955625534f,
                                        0.16093020141124725f,
                                        0.24611230194568634f,
                                        0.33791524171829224f,
                                        0.44070982933044434f,
                                        0.5626170039176941f,
                                        0.7229568362236023f,
                                        1.0f};
alignas(64) constexpr float kInt4[16] = {-8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f,
                                         0.0f,  1.0f,  2.0f,  3.0f,  4.0f,  5.0f,  6.0f,  7.0f};
alignas(64) constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// The value of table[low 4 bits] in each lane.
inline Vec lookup(const float* table, VecBits index) {
#if defined(__AVX512F__)
  return _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(index), _mm512_load_ps(table));
#elif defined(__AVX2__)
  const __m256i i = reinterpret_cast<__m256i>(index);
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), i);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), i);
  return _mm256_blendv_ps(low, high, reinterpret_cast<__m256>(index << 28));
#else
  Vec x;
  for (int i = 0; i < kLanes; i++) x[i] = table[index[i] & 15u];
  return x;
#endif
}

// Which k of a 4-bit word lies at bit 4·j.
constexpr int kNibbleOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// The kBits bits of a word from bit `at` on, less zero: as the last bits of a power of two, from which that is taken
// off. at + kBits: 23 at most.
template <int kBits>
inline Vec number_at(VecBits word, int at, VecInt zero) {
  const uint32_t mask = ((1u << kBits) - 1) << at;
  const float power = static_cast<float>(1 << (23 - at));
#if defined(__AVX512F__)
  const __m512i masks = _mm512_set1_epi32(static_cast<int>(mask)), powers = _mm512_castps_si512(_mm512_set1_ps(power));
  // word & mask | power
  const Vec number = reinterpret_cast<Vec>(
      _mm512_maskz_ternarylogic_epi32(0xffff, reinterpret_cast<__m512i>(word), masks, powers, 0xea));
#else
  const Vec number = from_bits((word & mask) | to_bits(power));
#endif
  return number - (power + __builtin_convertvector(zero, Vec));
}

// A format: kCodes in a word; value(word, j, zero) of the code at the j-th place, of which order(j) is the k.
struct Int4Codes {
  static constexpr int kCodes = 8;
  static constexpr int order(int j) { return kNibbleOrder[j]; }
  static Vec value(VecBits word, int j, VecInt zero) {
    return number_at<4>(j < 4 ? word : word >> 16, 4 * j % 16, zero);
  }
};

struct Int8Codes {
  static constexpr int kCodes = 4;
  static constexpr int order(int j) { return j; }
  static Vec value(VecBits word, int j, VecInt zero) {
    return number_at<8>(j < 2 ? word : word >> 16, 8 * j % 16, zero);
  }
};

struct Fp8Codes {
  static constexpr int kCodes = 4;
  static constexpr int order(int j) { return j; }
  static Vec value(VecBits word, int j, VecInt) { return e4m3_value(word >> (8 * j)); }
};

template <const float (&kValues)[16]>
struct TableCodes {
  static constexpr int kCodes = 8;
  static constexpr int order(int j) { return kNibbleOrder[j]; }
  static Vec value(VecBits word, int j, VecInt) { return lookup(kValues, word >> (4 * j)); }
};
using Nf4Codes = TableCodes<kNf4>;
using E2m1Codes = TableCodes<kE2m1>;
using SymmetricInt4Codes = TableCodes<kInt4>;  // int4 without zeros

}  // namespace llmc
