// Codes in planes (api.h), and places in a table of integers: joined to a byte each, as 8-bit codes lie, before products
// see them. From then on they are 8-bit codes.
#pragma once
#include "code_products.h"

namespace llmc {

// Looks up each byte in kIq4Bytes.
inline VecBits looked_up(VecBits places) {
#if defined(__AVX512BW__)
  const __m512i table = _mm512_maskz_broadcast_i32x4(0xffff, _mm_load_si128(reinterpret_cast<const __m128i*>(kIq4Bytes)));
  return reinterpret_cast<VecBits>(_mm512_maskz_shuffle_epi8(~__mmask64{0}, table, reinterpret_cast<__m512i>(places)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kIq4Bytes)));
  return reinterpret_cast<VecBits>(_mm256_shuffle_epi8(table, reinterpret_cast<__m256i>(places)));
#else
  VecBits found = {};
  for (int lane = 0; lane < kLanes; lane++)
    for (int i = 0; i < 32; i += 8) found[lane] |= static_cast<uint32_t>(kIq4Bytes[places[lane] >> i & 15u]) << i;
  return found;
#endif
}

// The i-th word of bytes, of four k, of a unit of 32 k: of planes of kLow bits and of kMore above them. word(j): the
// unit's j-th.
template <int kLow, int kMore, bool kTable, class Word>
inline __attribute__((always_inline)) VecBits joined(const Word& word, int i) {
  constexpr uint32_t kMask = ((1u << kLow) - 1) * 0x01010101u;
  const VecBits low = word(kLow * i / 8) >> (kLow * i % 8) & kMask;
  if constexpr (kTable) return looked_up(low);
  if constexpr (kMore == 0) return low;
  constexpr uint32_t kAbove = ((1u << kMore) - 1) * (0x01010101u << kLow);
  const int at = kMore * i % 8;
  const VecBits more = word(kLow + kMore * i / 8);
  return low | ((at <= kLow ? more << (kLow - at) : more >> (at - kLow)) & kAbove);
}

// `words` words of bytes, of stored codes that lie together.
template <int kLow, int kMore, bool kTable>
inline void join_units(const uint8_t* from, int64_t words, uint8_t* to) {
  constexpr int64_t kRow = LLMC_PANEL * 4;
  for (int64_t word = 0; word < words; word += 8, from += (kLow + kMore) * kRow) {
    const int64_t count = std::min<int64_t>(8, words - word);
    for (int64_t lane = 0; lane < kRow; lane += sizeof(VecBits)) {
      VecBits unit[kLow + kMore], bytes[8];
#pragma GCC unroll 6
      for (int i = 0; i < kLow + kMore; i++) std::memcpy(&unit[i], from + i * kRow + lane, sizeof unit[i]);
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) bytes[i] = joined<kLow, kMore, kTable>([&](int at) { return unit[at]; }, i);
      for (int64_t i = 0; i < count; i++) std::memcpy(to + i * kRow + lane, &bytes[i], sizeof bytes[i]);
    }
    to += count * kRow;
  }
}

// Calls body(low, more, table) for a format: the bits of its two planes, and whether codes are looked up in a table.
template <class Body>
inline void with_planes(const CodeRecord& record, const Body& body) {
  using std::integral_constant;
  const auto planes = [&](auto low, auto more, auto table) { body(low, more, table); };
  constexpr std::true_type yes{};
  constexpr std::false_type no{};
  switch (record.stored_bits) {
    case 2:
      return planes(integral_constant<int, 2>{}, integral_constant<int, 0>{}, no);
    case 3:
      return planes(integral_constant<int, 2>{}, integral_constant<int, 1>{}, no);
    case 4:
      return planes(integral_constant<int, 4>{}, integral_constant<int, 0>{}, yes);
    case 5:
      return planes(integral_constant<int, 4>{}, integral_constant<int, 1>{}, no);
    default:
      return planes(integral_constant<int, 4>{}, integral_constant<int, 2>{}, no);
  }
}

// The block with bytes for codes, which go `to` there.
inline void join_planes(CodeBlock& block, uint8_t* to) {
  with_planes(block.panels.record, [&](auto low, auto more, auto table) {
    const auto join = join_units<low, more, table>;
    if (block.panels.is_blocked()) return join(block.codes, block.groups * block.words, to);
    for (int64_t group = 0; group < block.groups; group++)
      join(block.codes + group * block.group_bytes, block.words, to + group * block.words * LLMC_PANEL * 4);
  });
  block.codes = to;
  block.group_bytes = block.words * LLMC_PANEL * 4;
}

}  // namespace llmc
