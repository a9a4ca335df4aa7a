// The rows of a head with the highest scores: best_rows of llmc/ops/compact_kv.py.
#pragma once
#include <cstdint>
#include <cstring>

namespace llmc {

// Larger for larger floats.
inline uint32_t ordered(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The rows of a head that are kept: those that score more than `least`, and the first `ties` of those that score it.
struct RowChoice {
  const float* scores;
  int64_t first, last;  // of the rows whose scores count
  uint32_t least = 0;
  int64_t ties = 0;

  // Finds the least score that stays from its highest eight bits down.
  RowChoice(const float* scores, int64_t first, int64_t last, int64_t kept) : scores(scores), first(first), last(last) {
    ties = kept;
    for (int shift = 24; shift >= 0; shift -= 8) {
      int64_t counts[256] = {};
      for (int64_t row = first; row < last; row++) {
        const uint32_t bits = ordered(scores[row]);
        if (shift == 24 || (bits >> (shift + 8)) == (least >> (shift + 8))) counts[bits >> shift & 255]++;
      }
      uint32_t digit = 255;
      for (; digit > 0 && counts[digit] < ties; digit--) ties -= counts[digit];
      least |= digit << shift;
    }
  }

  bool keeps(int64_t row) {
    if (row < first || row >= last) return true;
    const uint32_t bits = ordered(scores[row]);
    return bits > least || (bits == least && ties-- > 0);
  }
};

}  // namespace llmc
