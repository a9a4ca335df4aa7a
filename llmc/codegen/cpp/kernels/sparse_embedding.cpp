// Embedding lookups in weights without their zeros: y[t] = weight[ids[t]], from the panels of a tied lm_head.
//
// A row's elements lie among those of 31 others: a lookup counts the bits of every mask of its panel.
#include "code_panels.h"
#include "kernel.h"
#include "thread_pool.h"

// y[t] = weight[ids[t]]                          (llmc::embedding of llmc::sparse_bitmask and llmc::sparse_codes)
typedef struct {
  int64_t tokens, channels, group, panels;
  const int32_t* ids;
  const void* weight;  // sparse panels, or sparse code panels
  LlmcRows y;
  int32_t format, scale_type, has_zeros, is_sparse;  // of codes
} LlmcSparseEmbedding;

namespace llmc {
namespace {

// Elements of one panel by their places in it, asked for in ascending order.
template <class E>
class ElementReader {
 public:
  explicit ElementReader(SparseCursor at) : at_(at) {}

  E at(int64_t place) {
    for (; word_ < place / 64; word_++, at_.mask++) at_.value += count(*at_.mask) * static_cast<int64_t>(sizeof(E));
    const uint64_t bit = uint64_t{1} << (place % 64);
    E element = kZeroElement<E>;
    if ((*at_.mask & bit) != 0)
      std::memcpy(&element, at_.value + count(*at_.mask & (bit - 1)) * static_cast<int64_t>(sizeof(E)), sizeof element);
    return element;
  }

 private:
  static int64_t count(uint64_t mask) { return __builtin_popcountll(mask); }

  SparseCursor at_;
  int64_t word_ = 0;
};

// Calls body(y's row, panel, lane) for every token.
template <class T, class Body>
void for_tokens(LlmcPool* pool, const LlmcSparseEmbedding& a, const Body& body) {
  parallel_for(pool, a.tokens, [&](int64_t t, void*) {
    body(static_cast<T*>(a.y.data) + t * a.y.stride, a.ids[t] / LLMC_PANEL, a.ids[t] % LLMC_PANEL);
  });
}

template <class T>
void sparse_embedding(LlmcPool* pool, const LlmcSparseEmbedding& a) {
  constexpr int64_t kStep = 4 / sizeof(T);  // neighbouring k of a lane
  const int64_t elements = (a.channels + kStep - 1) / kStep * kStep * LLMC_PANEL;
  const SparsePanels panels{static_cast<const uint8_t*>(a.weight), a.panels, (elements + 63) / 64, 0};
  for_tokens<T>(pool, a, [&](T* y, int64_t panel, int64_t lane) {
    ElementReader<ElementOf<T>> read(panels.cursor(panel));
    for (int64_t k = 0; k < a.channels; k++) {
      const ElementOf<T> element = read.at((k / kStep * LLMC_PANEL + lane) * kStep + k % kStep);
      std::memcpy(y + k, &element, sizeof element);
    }
  });
}

template <class T>
void sparse_code_embedding(LlmcPool* pool, const LlmcSparseEmbedding& a) {
  const CodePanels codes(a, a.channels);
  const SparsePanels panels = codes.sparse(a.panels);
  for_tokens<T>(pool, a, [&](T* y, int64_t panel, int64_t lane) {
    ElementReader<uint8_t> read(panels.cursor(panel));
    const int64_t first = lane / kLanes * kLanes;
    for (int64_t k = 0; k < a.channels; k++) {
      const uint8_t* header = panels.header(panel) + k / a.group * codes.scale_bytes;
      const float scale = load_scales(header, codes.scale_type, static_cast<int>(first))[lane - first];
      const int64_t word = k / a.group * codes.words(a.group) + k % a.group / 4;
      const int32_t code = read.at((word * LLMC_PANEL + lane) * 4 + k % 4) - kZeroElement<uint8_t>;
      y[k] = from_float<T>(static_cast<float>(code) * scale);
    }
  });
}

}  // namespace
}  // namespace llmc

LLMC_KERNELS(LlmcSparseEmbedding, sparse_embedding, llmc::sparse_embedding)
LLMC_KERNELS(LlmcSparseEmbedding, sparse_code_embedding, llmc::sparse_code_embedding)
