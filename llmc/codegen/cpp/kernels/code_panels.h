// How quantized weights lie in memory (kernels/api.h describes it) and what their codes stand for.
#pragma once
#include <algorithm>

#include "api.h"
#include "sparse_panels.h"
#include "token_codes.h"

namespace llmc {

constexpr int kCodeVecs = 2;  // vectors of lanes that products take at a time

// ---- what codes are ----------------------------------------------------------------------------------------------
// A format. zero: the code of zero, as codes are stored. step_bits: of the steps by which a float is multiplied that
// several groups share; 0 where each group has a float. group: of a blocked format; 0 where weights choose it.
struct CodeRecord {
  int64_t stored_bits;
  int32_t zero;
  int64_t group, step_bits;
  int32_t least_step;
  bool has_minimum, is_table;
};
// CODE_FORMATS of llmc/formats/code_format.py, in the order of LlmcCodes.
constexpr CodeRecord kRecords[] = {
    {8, 128, 0, 0, 0, false, false},      // int8
    {4, 8, 0, 0, 0, false, false},        // int4
    {8, 128, 0, 0, 0, false, false},      // fp8
    {4, 8, 0, 0, 0, false, false},        // nf4
    {4, 8, 0, 0, 0, false, false},        // mxfp4
    {5, 16, 0, 0, 0, false, false},       // int5
    {6, 32, 0, 0, 0, false, false},       // int6
    {4, 0, 32, 0, 0, true, false},        // q4_1
    {5, 0, 32, 0, 0, true, false},        // q5_1
    {2, 0, 16, 4, 0, true, false},        // q2_k
    {3, 4, 16, 6, -32, false, false},     // q3_k
    {4, 0, 32, 6, 0, true, false},        // q4_k
    {5, 0, 32, 6, 0, true, false},        // q5_k
    {6, 32, 16, 8, -128, false, false},   // q6_k
    {4, 128, 32, 0, 0, false, true},      // iq4_nl
    {4, 128, 32, 6, -32, false, true},    // iq4_xs
};
static_assert(sizeof(kRecords) / sizeof(kRecords[0]) == LLMC_IQ4_XS + 1, "each format of LlmcCodes has a record");

// ---- where things lie ------------------------------------------------------------------------------------------
// The panels of one weight. A part is a run of k inside one group. Products take codes of 4 or of 8 bits: what is
// stored in planes, or as places in a table of integers, is joined to 8 first (code_planes.h). run: of k that share a
// float; of a blocked format several groups, which the weight chooses.
struct CodePanels {
  const uint8_t* data;
  const CodeRecord& record;
  int64_t in, group, run, bits, scale_bytes;
  LlmcScales scale_type;
  bool has_zeros, is_sparse;

  template <class Arguments>
  explicit CodePanels(const Arguments& a, int64_t in)
      : data(static_cast<const uint8_t*>(a.weight)),
        record(kRecords[a.format]),
        in(in),
        group(is_blocked() ? record.group : a.group),
        run(a.group),
        bits(record.stored_bits != 4 || record.is_table ? 8 : 4),
        scale_bytes(LLMC_PANEL * (a.scale_type == LLMC_SCALES_F32 ? 4 : 2)),
        scale_type(static_cast<LlmcScales>(a.scale_type)),
        has_zeros(a.has_zeros != 0),
        is_sparse(a.is_sparse != 0) {}

  bool is_blocked() const { return record.group != 0; }
  bool is_joined() const { return record.stored_bits != bits; }
  int32_t usual_zero() const { return record.zero; }
  int64_t words(int64_t k) const { return (k * bits + 31) / 32; }
  int64_t stored_words(int64_t k) const { return is_joined() ? (k + 31) / 32 * record.stored_bits : words(k); }
  int64_t float_bytes() const { return scale_bytes * (record.has_minimum ? 2 : 1); }
  // Size of one run's header.
  int64_t header_bytes() const {
    if (!is_blocked()) return scale_bytes + (has_zeros ? LLMC_PANEL * 2 : 0);
    const int64_t bits = run / group * record.step_bits * (record.has_minimum ? 2 : 1);
    return float_bytes() + (bits + 15) / 16 * LLMC_PANEL * 2;
  }
  int64_t run_bytes() const { return header_bytes() + stored_words(run) * LLMC_PANEL * 4; }
  int64_t panel_bytes() const { return in / run * run_bytes(); }
  // Distance between the codes of neighbouring groups, for codes that are not joined.
  int64_t group_bytes() const { return is_blocked() ? words(group) * LLMC_PANEL * 4 : run_bytes(); }
  // The panels stored without zeros; only symmetric codes of 8 bits can be stored so.
  SparsePanels sparse(int64_t panels) const {
    return {data, panels, in / group * words(group) * (LLMC_PANEL * 4 / 64), in / group * scale_bytes};
  }
  const uint8_t* header(int64_t panel, int64_t k) const {
    return data + panel * panel_bytes() + k / run * (is_blocked() ? header_bytes() : run_bytes());
  }
  // k: a multiple of 8, or of 32 where codes are joined.
  const uint8_t* codes(int64_t panel, int64_t k) const {
    if (is_blocked()) return header(panel, in) + stored_words(k) * LLMC_PANEL * 4;
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

// Loads the scales of kLanes rows, starting at `lane`.
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

// `bits` bits of each row's string of halves, starting at bit `at`, for kLanes rows.
inline VecHalves load_steps(const uint8_t* halves, int64_t at, int64_t bits, int lane) {
  const uint8_t* from = halves + (at / 16 * LLMC_PANEL + lane) * 2;
  const int shift = static_cast<int>(at % 16);
  VecHalves string, more;
  std::memcpy(&string, from, sizeof string);
  string >>= shift;
  if (shift + bits > 16) {
    std::memcpy(&more, from + LLMC_PANEL * 2, sizeof more);
    string |= more << (16 - shift);
  }
  return string & static_cast<uint16_t>((1u << bits) - 1);
}

// The factor that a step stands for, of a float.
inline Vec step_factor(VecHalves step, int32_t least) {
  return __builtin_convertvector(reinterpret_cast<VecInt>(widen_halves(step)) + least, Vec);
}

// The scale and the minimum of a group, the i-th of its run, for the rows from `lane` on. The minimum is 0 where the
// format has none.
struct ScaleAndMinimum {
  Vec scale, minimum;
};
inline ScaleAndMinimum scale_and_minimum(const CodePanels& panels, const uint8_t* header, int64_t i, int lane) {
  const CodeRecord& record = panels.record;
  ScaleAndMinimum found{load_scales(header, panels.scale_type, lane), Vec{}};
  if (record.has_minimum) found.minimum = load_scales(header + panels.scale_bytes, panels.scale_type, lane);
  if (record.step_bits == 0) return found;
  const uint8_t* halves = header + panels.float_bytes();
  const auto step = [&](int64_t place) { return load_steps(halves, place * record.step_bits, record.step_bits, lane); };
  found.scale *= step_factor(step(i), record.least_step);
  if (record.has_minimum) found.minimum *= step_factor(step(panels.run / panels.group + i), 0);
  return found;
}

// Bytes of a group's scales, and minima where the format has them, in fp32.
inline int64_t decoded_header_bytes(const CodeRecord& record) { return LLMC_PANEL * 4 * (record.has_minimum ? 2 : 1); }

// Eight steps of kBits bits times a factor, of the rows from `lane` on. halves: where the first step begins. Steps stay
// where they lie in a word, as bits of a float, which takes half the instructions of shifting and converting each.
template <int kBits, int kLeast>
inline void multiply_eight_steps(Vec factor, const uint8_t* halves, int lane, float* to, int64_t stride) {
  VecBits words[kBits / 2];
#pragma GCC unroll 4
  for (int i = 0; i < kBits / 2; i++) {
    VecHalves half;
    std::memcpy(&half, halves + (i * LLMC_PANEL + lane) * 2, sizeof half);
    words[i] = widen_halves(half);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const int half = i * kBits / 16, at = i * kBits % 16;
    const VecBits word = at + kBits > 16 ? words[half] | words[half + 1] << 16 : words[half];
    store(to + i * stride, factor * number_at<kBits>(word, at, VecInt{} - kLeast));
  }
}

// Calls body(bits, least) for a format: the bits of its steps, and the least step. Both are 0 where each group has a
// float.
template <class Body>
inline void with_steps(const CodeRecord& record, const Body& body) {
  using std::integral_constant;
  switch (record.step_bits) {
    case 4:
      return body(integral_constant<int, 4>{}, integral_constant<int, 0>{});
    case 6:
      if (record.least_step == 0) return body(integral_constant<int, 6>{}, integral_constant<int, 0>{});
      return body(integral_constant<int, 6>{}, integral_constant<int, -32>{});
    case 8:
      return body(integral_constant<int, 8>{}, integral_constant<int, -128>{});
    default:
      return body(integral_constant<int, 0>{}, integral_constant<int, 0>{});
  }
}

// Scales and minima of `count` groups of one run, the i-th and following ones, with constants of with_steps. All of a
// run are decoded together: taken one by one, as scale_and_minimum does, they cost as much time as one token's product.
template <int kBits, int kLeast, bool kMinima>
inline void decode_run(const CodePanels& panels, const uint8_t* header, int64_t i, int64_t count, float* to) {
  constexpr int64_t kStride = LLMC_PANEL * (kMinima ? 2 : 1);
  // Minima have the same number of floats and steps, behind the scales'. Their least step is 0.
  static_assert(kLeast == 0 || !kMinima, "one least step");
  const int64_t numbers = kMinima ? 2 : 1, of_run = panels.run / panels.group;
  if constexpr (kBits == 0) {  // one group
    for (int64_t number = 0; number < numbers; number++)
      for (int lane = 0; lane < LLMC_PANEL; lane += kLanes)
        store(to + number * LLMC_PANEL + lane,
              load_scales(header + number * panels.scale_bytes, panels.scale_type, lane));
  } else {
    const uint8_t* halves = header + panels.float_bytes();
    for (const int64_t end = i + count; i < end;) {
      // Eight steps at a time where they begin at a half.
      const bool eight = i % 8 == 0 && of_run % 8 == 0 && i + 8 <= end;
      for (int64_t number = 0; number < numbers; number++)
        for (int lane = 0; lane < LLMC_PANEL; lane += kLanes) {
          const Vec factor = load_scales(header + number * panels.scale_bytes, panels.scale_type, lane);
          const int64_t bit = (number * of_run + i) * kBits;
          float* of_rows = to + number * LLMC_PANEL + lane;
          if (eight)
            multiply_eight_steps<kBits, kLeast>(factor, halves + bit / 16 * LLMC_PANEL * 2, lane, of_rows, kStride);
          else
            store(of_rows, factor * step_factor(load_steps(halves, bit, kBits, lane), kLeast));
        }
      i += eight ? 8 : 1;
      to += (eight ? 8 : 1) * kStride;
    }
  }
}

// Scales and minima of all rows of a panel, for `groups` groups from k on. header: of the run of k.
inline void decode_headers(const CodePanels& panels, const uint8_t* header, int64_t k, int64_t groups, uint8_t* to) {
  const int64_t of_run = panels.run / panels.group, bytes = decoded_header_bytes(panels.record);
  with_steps(panels.record, [&](auto bits, auto least) {
    const auto decode = [&](auto minima) {
      int64_t i = k % panels.run / panels.group;
      while (groups > 0) {
        const int64_t count = std::min(groups, of_run - i);
        decode_run<bits, least, minima>(panels, header, i, count, reinterpret_cast<float*>(to));
        to += count * bytes;
        groups -= count;
        header += panels.header_bytes();
        i = 0;
      }
    };
    if constexpr (least == 0)
      if (panels.record.has_minimum) return decode(std::true_type{});
    decode(std::false_type{});
  });
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
// Source: ggml-common.h of llama.cpp, kvalues_iq4nl; as bytes, plus 128.
alignas(16) constexpr uint8_t kIq4Bytes[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
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

// A format: kCodes codes per word; value(word, j, zero) of the code at the j-th place, which belongs to k = order(j).
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
