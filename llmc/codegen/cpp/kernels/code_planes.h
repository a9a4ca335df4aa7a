// Codes of 5 and 6 bits, whose low four bits and what is above lie apart (api.h): joined to a byte each, as 8-bit codes
// lie, before products see them. From then on they are 8-bit codes.
#pragma once
#include "code_products.h"

namespace llmc {

// The i-th word of bytes, of four k, of a unit of 32 k: four words of low bits, then kMore words of bits above.
template <int kMore>
inline VecBits joined(const VecBits (&unit)[4 + kMore], int i) {
  constexpr uint32_t kAbove = ((1u << kMore) - 1) * 0x10101010u;
  const int at = kMore * i % 8;
  const VecBits more = unit[4 + kMore * i / 8], low = i % 2 == 0 ? unit[i / 2] : unit[i / 2] >> 4;
  return (low & 0x0f0f0f0fu) | ((at <= 4 ? more << (4 - at) : more >> (at - 4)) & kAbove);
}

template <int kMore>
void join_planes(const CodeBlock& block, uint8_t* to) {
  constexpr int64_t kRow = LLMC_PANEL * 4;
  for (int64_t group = 0; group < block.groups; group++) {
    const uint8_t* from = block.codes + group * block.group_bytes;
    for (int64_t word = 0; word < block.words; word += 8, from += (4 + kMore) * kRow) {
      const int64_t count = std::min<int64_t>(8, block.words - word);
      for (int64_t lane = 0; lane < kRow; lane += sizeof(VecBits)) {
        VecBits unit[4 + kMore], bytes[8];
#pragma GCC unroll 6
        for (int i = 0; i < 4 + kMore; i++) std::memcpy(&unit[i], from + i * kRow + lane, sizeof unit[i]);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) bytes[i] = joined<kMore>(unit, i);
        for (int64_t i = 0; i < count; i++) std::memcpy(to + i * kRow + lane, &bytes[i], sizeof bytes[i]);
      }
      to += count * kRow;
    }
  }
}

// The block with bytes for codes, which go `to` there.
inline void join_planes(CodeBlock& block, uint8_t* to) {
  (block.panels.stored_bits == 6 ? join_planes<2> : join_planes<1>)(block, to);
  block.codes = to;
  block.group_bytes = block.words * LLMC_PANEL * 4;
}

}  // namespace llmc
