// Transposition of a square of floats held in vectors.
#pragma once
#include "vector.h"

namespace llmc {

#if defined(__AVX512F__)

inline void transpose(Vec (&rows)[kLanes]) {
  // The forms without a mask give false warnings of uninitialized values in GCC's own header; the code is the same.
  constexpr __mmask16 kAll = 0xffff;
  constexpr __mmask8 kAllPairs = 0xff;
  // Inside each 4×4 square first, then the squares: 2 × 16 + 2 × 16 shuffles.
  __m512 pairs[16], squares[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_maskz_unpacklo_ps(kAll, rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_maskz_unpackhi_ps(kAll, rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    const __m512d a = _mm512_castps_pd(pairs[i]), b = _mm512_castps_pd(pairs[i + 1]);
    const __m512d c = _mm512_castps_pd(pairs[i + 2]), d = _mm512_castps_pd(pairs[i + 3]);
    squares[i] = _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(kAllPairs, a, c));
    squares[i + 1] = _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(kAllPairs, a, c));
    squares[i + 2] = _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(kAllPairs, b, d));
    squares[i + 3] = _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(kAllPairs, b, d));
  }
  for (int i = 0; i < 4; i++) {
    const __m512 even_low = _mm512_maskz_shuffle_f32x4(kAll, squares[i], squares[4 + i], 0x88);
    const __m512 odd_low = _mm512_maskz_shuffle_f32x4(kAll, squares[i], squares[4 + i], 0xdd);
    const __m512 even_high = _mm512_maskz_shuffle_f32x4(kAll, squares[8 + i], squares[12 + i], 0x88);
    const __m512 odd_high = _mm512_maskz_shuffle_f32x4(kAll, squares[8 + i], squares[12 + i], 0xdd);
    rows[i] = _mm512_maskz_shuffle_f32x4(kAll, even_low, even_high, 0x88);
    rows[4 + i] = _mm512_maskz_shuffle_f32x4(kAll, odd_low, odd_high, 0x88);
    rows[8 + i] = _mm512_maskz_shuffle_f32x4(kAll, even_low, even_high, 0xdd);
    rows[12 + i] = _mm512_maskz_shuffle_f32x4(kAll, odd_low, odd_high, 0xdd);
  }
}

// Transposes 16 rows of 8. Vector i holds two rows: low_row_of(i), and the row four below it.
constexpr int low_row_of(int i) { return i < 4 ? i : i + 4; }

inline void transpose_halves(Vec (&rows)[8]) {
  constexpr __mmask16 kAll = 0xffff;
  constexpr __mmask8 kAllPairs = 0xff;
  __m512 squares[8];
  for (int i = 0; i < 8; i += 4) {
    const __m512d a = _mm512_castps_pd(_mm512_maskz_unpacklo_ps(kAll, rows[i], rows[i + 1]));
    const __m512d b = _mm512_castps_pd(_mm512_maskz_unpackhi_ps(kAll, rows[i], rows[i + 1]));
    const __m512d c = _mm512_castps_pd(_mm512_maskz_unpacklo_ps(kAll, rows[i + 2], rows[i + 3]));
    const __m512d d = _mm512_castps_pd(_mm512_maskz_unpackhi_ps(kAll, rows[i + 2], rows[i + 3]));
    squares[i] = _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(kAllPairs, a, c));
    squares[i + 1] = _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(kAllPairs, a, c));
    squares[i + 2] = _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(kAllPairs, b, d));
    squares[i + 3] = _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(kAllPairs, b, d));
  }
  for (int i = 0; i < 4; i++) {
    rows[i] = _mm512_maskz_shuffle_f32x4(kAll, squares[i], squares[4 + i], 0x88);
    rows[4 + i] = _mm512_maskz_shuffle_f32x4(kAll, squares[i], squares[4 + i], 0xdd);
  }
}

#elif defined(__AVX2__)

inline void transpose(Vec (&rows)[kLanes]) {
  __m256 pairs[8], squares[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    squares[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    squares[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    squares[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    squares[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    rows[i] = _mm256_permute2f128_ps(squares[i], squares[4 + i], 0x20);
    rows[4 + i] = _mm256_permute2f128_ps(squares[i], squares[4 + i], 0x31);
  }
}

#else

inline void transpose(Vec (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; i++)
    for (int j = 0; j < i; j++) {
      const float kept = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = kept;
    }
}

#endif

}  // namespace llmc
