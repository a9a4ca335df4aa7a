// Weights without their zeros: how they lie in memory (api.h describes it), and how a block of a panel gets them back.
#pragma once
#include <algorithm>
#include <type_traits>

#include "api.h"
#include "vector.h"

namespace llmc {

// Where a reader of one panel stands: the mask of the next 64 elements, and the first of those that are not zero.
struct SparseCursor {
  const uint64_t* mask;
  const uint8_t* value;

  // Prefetches elements and masks well ahead, once per 64 bytes or more of elements: with 16 tokens this saves an
  // eighth of the time.
  __attribute__((always_inline)) void fetch() const {
    __builtin_prefetch(value + 2048);
    __builtin_prefetch(value + 2112);
    __builtin_prefetch(mask + 128);
  }
};

// A weight's panels. masks_per_panel: each is of 64 elements in the order of a dense panel. header_bytes: of a panel's
// scales, if it has some.
struct SparsePanels {
  const uint8_t* data;
  int64_t panels, masks_per_panel, header_bytes;

  const uint64_t* offsets() const { return reinterpret_cast<const uint64_t*>(data); }
  const uint64_t* masks() const { return offsets() + panels + 1; }
  const uint8_t* header(int64_t panel) const {
    return reinterpret_cast<const uint8_t*>(masks() + panels * masks_per_panel) + panel * header_bytes;
  }
  SparseCursor cursor(int64_t panel) const { return {masks() + panel * masks_per_panel, data + offsets()[panel]}; }
};

// The bits of a plain weight's elements.
template <class T>
using ElementOf = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;

// The representation of zero in each element type: codes are shifted to be unsigned.
template <class E>
constexpr E kZeroElement = 0;
template <>
constexpr uint8_t kZeroElement<uint8_t> = 128;

#if defined(__AVX512VBMI2__)
// A register of zeros that compilers cannot recognize as zero. Merging with it makes the instructions below
// independent. With a zeroing mask they would depend on their register's previous value (Zen 4: a tenth of the time of
// one token).
inline __attribute__((always_inline)) __m512i zeros_to_merge() {
  __m512i zeros = _mm512_setzero_si512();
  asm("" : "+v"(zeros));
  return zeros;
}

// Expands elements to a full register; `mask` selects the lanes that are stored, and the others are zero.
inline __attribute__((always_inline)) __m512i expand_register(const uint8_t* from, uint32_t mask, uint16_t) {
  return _mm512_mask_expand_epi16(zeros_to_merge(), mask, _mm512_loadu_si512(from));
}
inline __attribute__((always_inline)) __m512i expand_register(const uint8_t* from, uint64_t mask, uint8_t) {
  // As an instruction, so that it takes a register: from memory it takes a tenth longer for one token (Zen 4).
  __m512i codes = _mm512_set1_epi8(-128);
  asm("vpexpandb %1, %0%{%2%}" : "+v"(codes) : "v"(_mm512_loadu_si512(from)), "Yk"(static_cast<__mmask64>(mask)));
  return codes;
}
inline __attribute__((always_inline)) __m512i expand_register(const uint8_t* from, uint16_t mask, uint32_t) {
  return _mm512_mask_expand_epi32(zeros_to_merge(), mask, _mm512_loadu_si512(from));
}

// A bit for each element E of a register.
template <class E>
using RegisterMask =
    std::conditional_t<sizeof(E) == 1, uint64_t, std::conditional_t<sizeof(E) == 2, uint32_t, uint16_t>>;

// The next register of elements E; the cursor's value moves on.
template <class E>
inline __attribute__((always_inline)) __m512i next_register(SparseCursor& at, RegisterMask<E> mask) {
  const __m512i elements = expand_register(at.value, mask, E{});
  at.value += __builtin_popcountll(mask) * static_cast<int64_t>(sizeof(E));
  return elements;
}

#endif

// `masks` times 64 elements from the cursor on, zeros between them.
template <class E>
inline void expand(SparseCursor& at, int64_t masks, E* to) {
#if defined(__AVX512VBMI2__)
  constexpr int kRegisters = sizeof(E), kElements = 64 / kRegisters;  // of a mask, and of one of those
  for (int64_t i = 0; i < masks; i++) {
    const uint64_t mask = *at.mask++;
#pragma GCC unroll 4
    for (int part = 0; part < kRegisters; part++, to += kElements)
      _mm512_storeu_si512(to, next_register<E>(at, static_cast<RegisterMask<E>>(mask >> (kElements * part))));
  }
#else
  for (int64_t i = 0; i < masks; i++, to += 64) {
    std::fill_n(to, 64, kZeroElement<E>);
    for (uint64_t mask = *at.mask++; mask != 0; mask &= mask - 1, at.value += sizeof(E))
      std::memcpy(to + __builtin_ctzll(mask), at.value, sizeof(E));
  }
#endif
}

}  // namespace llmc
