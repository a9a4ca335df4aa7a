// Matrix products with weights without their zeros: those of linear.h, whose blocks are expanded on the way.
//
// Sums run over the same numbers in the same order as over a dense weight with the same zeros: the bits are the same.
// With few tokens elements are put into their places in registers, 64 at a time; with many, a block is expanded to cache
// once for all tiles. Bytes moved: masks and what is not zero.
#include "linear.h"
#include "sparse_panels.h"

namespace llmc {

#if defined(__AVX512VBMI2__) && defined(__AVX512BF16__) && !defined(__AMX_BF16__)
// multiply_panel of bf16 from a cursor. keep: where to leave the block expanded for other tiles, or null.
template <int kHeight, bool kKeeps>
void multiply_sparse(SparseCursor& cursor, const uint32_t* x, int64_t steps, float* sums, bool first, bf16* keep) {
  constexpr int kVecs = PanelProduct<bf16>::kVecs;
  static_assert(kVecs * 2 * kLanes == 64);
  Vec running[kHeight][kVecs];
#pragma GCC unroll 16
  for (int t = 0; t < kHeight; t++)
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; v++) running[t][v] = first ? Vec{} : load(sums + t * LLMC_PANEL + v * kLanes);
  SparseCursor at = cursor;
  for (int64_t s = 0; s < steps; s++) {
    at.fetch();
    const uint64_t mask = *at.mask++;
    const auto low = static_cast<uint32_t>(mask), high = static_cast<uint32_t>(mask >> 32);
    const uint8_t* upper = at.value + 2 * __builtin_popcount(low);
    const __m512i w[kVecs] = {expand_register(at.value, low, uint16_t{}), expand_register(upper, high, uint16_t{})};
    at.value += 2 * __builtin_popcountll(mask);
    if constexpr (kKeeps) {
      _mm512_store_si512(keep, w[0]);
      _mm512_store_si512(keep + 2 * kLanes, w[1]);
      keep += 64;
    }
    add_pairs<kHeight>(running, w, x);
    x += kHeight;
  }
  cursor = at;
#pragma GCC unroll 16
  for (int t = 0; t < kHeight; t++)
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; v++) store(sums + t * LLMC_PANEL + v * kLanes, running[t][v]);
}

template <class T>
constexpr bool kMultipliesSparse = std::is_same_v<T, bf16>;

// The first tile, which expands the block on the way.
inline void multiply_first_tile(SparseCursor& cursor, const PanelBlock<bf16>& block, bf16* expanded) {
  constexpr auto kHeights = std::make_integer_sequence<int, PanelProduct<bf16>::kTokens>();
  static constexpr auto kMultiply = by_height<1>(kHeights, [](auto height) { return &multiply_sparse<height, false>; });
  static constexpr auto kMultiplyAndKeep =
      by_height<1>(kHeights, [](auto height) { return &multiply_sparse<height, true>; });
  const auto multiply = (block.tiles.count == 1 ? kMultiply : kMultiplyAndKeep)[block.tiles.height_of(0) - 1];
  multiply(cursor, block.x, block.count, block.sums, block.step == 0, expanded);
}
#else
template <class T>
constexpr bool kMultipliesSparse = false;
#endif

// As DensePanels.
template <class T>
struct SparseBlocks {
  SparsePanels panels;

  class Reader {
   public:
    Reader(const SparseBlocks& blocks, int64_t first, int64_t end, void* memory)
        : first_(first), expanded_(cache_line_from(static_cast<T*>(memory))) {
      for (int64_t panel = first; panel < end; panel++) cursors_[panel - first] = blocks.panels.cursor(panel);
    }

    void multiply(const PanelBlock<T>& block) {
      constexpr int64_t kElements = LLMC_PANEL * PanelProduct<T>::kStep;
      SparseCursor& cursor = cursors_[block.panel - first_];
      // The next block mostly reads the elements that follow in this panel.
      const int64_t next_stride = (kElements / 2 + block.tiles.count - 1) / block.tiles.count;
      if constexpr (kMultipliesSparse<T>) {
        multiply_first_tile(cursor, block, expanded_);
      } else {
        expand(cursor, (block.count * kElements + 63) / 64, reinterpret_cast<ElementOf<T>*>(expanded_));
      }
      const auto* next = reinterpret_cast<const T*>(cursor.value);
      multiply_tiles(product_, block, kMultipliesSparse<T> ? 1 : 0, expanded_, next, next_stride);
    }

   private:
    int64_t first_;
    T* expanded_;
    SparseCursor cursors_[kMostPanelsTogether];
    TileProduct<T> product_;
  };
};

template <class T, class Epilogue>
void sparse_product(LlmcPool* pool, const LlmcLinear& a) {
  constexpr int64_t kStep = PanelProduct<T>::kStep;
  const int64_t elements = (a.in + kStep - 1) / kStep * kStep * LLMC_PANEL;
  const SparsePanels weight{static_cast<const uint8_t*>(a.weight), Epilogue{a}.panels(), (elements + 63) / 64, 0};
  panels_product<T, Epilogue>(pool, a, SparseBlocks<T>{weight});
}

template <class T>
constexpr auto sparse_linear = sparse_product<T, LinearEpilogue<T, LlmcLinear>>;

template <class T>
constexpr auto sparse_gated_linear = sparse_product<T, GatedEpilogue<T, LlmcLinear>>;

template <class T>
constexpr auto sparse_lm_head = sparse_product<T, LinearEpilogue<float, LlmcLinear>>;

}  // namespace llmc

LLMC_KERNELS(LlmcLinear, sparse_linear, llmc::sparse_linear)
LLMC_KERNELS(LlmcLinear, sparse_gated_linear, llmc::sparse_gated_linear)
LLMC_KERNELS(LlmcLinear, sparse_lm_head, llmc::sparse_lm_head)
