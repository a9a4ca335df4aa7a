// Products and lookups of weights that a function yields row by row, for storages that have no kernels.
//
// A block of a panel is decoded to fp32 in cache, once for all tiles of tokens, and multiplied as a dense one is: in
// fp32, so that whatever the rows hold is exact. Sums run over k in ascending order, as in linear.h.
#include "experts.h"

// The products of LlmcLinear with such a weight [out, in]; gated: [2·out, in], gate's rows followed by up's.
typedef struct {
  int64_t tokens, in, out;
  LlmcRows x;
  LlmcReadRow read;
  LlmcStoredRows part0, part1, part2, part3;
  const float* bias;
  LlmcRows residual;
  LlmcRows y;
  int32_t activation;
  float scale;
  const int32_t* index;  // of experts, as in LlmcLinear
  int32_t* pairs;
  int64_t slots, x_slots, experts, first_row;
  LlmcRows delta;  // of adapters, as in LlmcLinear
  const int32_t* adapters;
} LlmcRowLinear;

// y[t] = row ids[t] of such a table
typedef struct {
  int64_t tokens, channels;
  const int32_t* ids;
  LlmcReadRow read;
  LlmcStoredRows part0, part1, part2, part3;
  LlmcRows y;
} LlmcRowEmbedding;

namespace llmc {
namespace {

struct RowReader {
  LlmcReadRow read;
  LlmcStoredRows parts[4];

  template <class Arguments>
  explicit RowReader(const Arguments& a) : read(a.read), parts{a.part0, a.part1, a.part2, a.part3} {}
  void operator()(int64_t row, int64_t k, int64_t count, float* to) const { read(parts, row, k, count, to); }
};

// The row of the weight in a lane of a panel with `outputs` outputs, or -1 if the lane is padding. A gated panel holds
// `outputs` gate rows and `outputs` up rows.
inline int64_t row_of_lane(int64_t panel, int64_t lane, int64_t out, int64_t outputs) {
  const int64_t row = panel * outputs + lane % outputs;
  return row >= out ? -1 : lane < outputs ? row : row + out;
}

// to[k][lane]
inline void decode_rows(const RowReader& read, const LlmcRowLinear& a, int64_t panel, int64_t outputs, int64_t k,
                        int64_t count, float* to) {
  float row[kBlockIn<float>];
  for (int64_t lane = 0; lane < LLMC_PANEL; lane++) {
    const int64_t number = row_of_lane(panel, lane, a.out, outputs);
    if (number < 0)
      std::fill_n(row, count, 0.0f);
    else
      read(a.first_row + number, k, count, row);
    for (int64_t i = 0; i < count; i++) to[i * LLMC_PANEL + lane] = row[i];
  }
}

// As DensePanels.
template <class Epilogue>
struct RowPanels {
  const LlmcRowLinear& a;

  class Reader {
   public:
    Reader(const RowPanels& panels, int64_t, int64_t, void* memory)
        : a_(panels.a), read_(panels.a), decoded_(static_cast<float*>(memory)) {}

    void multiply(const PanelBlock<float>& block) {
      decode_rows(read_, a_, block.panel, Epilogue::kOutputs, block.step, block.count, decoded_);
      multiply_tiles(product_, block, 0, decoded_, decoded_, 0);
    }

   private:
    const LlmcRowLinear& a_;
    const RowReader read_;
    float* decoded_;
    TileProduct<float> product_;
  };
};

template <class T, class Epilogue>
void row_product(LlmcPool* pool, const LlmcRowLinear& a) {
  panels_product<float, Epilogue, T>(pool, a, RowPanels<Epilogue>{a});
}

template <class T>
constexpr auto row_linear = row_product<T, LinearEpilogue<T, LlmcRowLinear>>;

template <class T>
constexpr auto row_gated_linear = row_product<T, GatedEpilogue<T, LlmcRowLinear>>;

template <class T>
void row_expert_linear(LlmcPool* pool, const LlmcRowLinear& a) {
  for_experts<T>(a, [&](int64_t expert, LlmcRowLinear one) {
    one.first_row = expert * a.out;
    row_linear<T>(pool, one);
  });
}

template <class T>
constexpr auto row_lm_head = row_product<T, LinearEpilogue<float, LlmcRowLinear>>;

template <class T>
void row_embedding(LlmcPool* pool, const LlmcRowEmbedding& a) {
  constexpr int64_t kMost = kBlockIn<float>;
  const RowReader read(a);
  parallel_each(pool, a.tokens, 8, [&](int64_t t) {
    float values[kMost];
    for (int64_t k = 0; k < a.channels; k += kMost) {
      const int64_t count = std::min(kMost, a.channels - k);
      read(a.ids[t], k, count, values);
      T* to = static_cast<T*>(a.y.data) + t * a.y.stride + k;
      for (int64_t i = 0; i < count; i++) to[i] = from_float<T>(values[i]);
    }
  });
}

}  // namespace
}  // namespace llmc

LLMC_KERNELS(LlmcRowLinear, row_linear, llmc::row_linear)
LLMC_KERNELS(LlmcRowLinear, row_gated_linear, llmc::row_gated_linear)
LLMC_KERNELS(LlmcRowLinear, row_expert_linear, llmc::row_expert_linear)
LLMC_KERNELS(LlmcRowLinear, row_lm_head, llmc::row_lm_head)
LLMC_KERNELS(LlmcRowEmbedding, row_embedding, llmc::row_embedding)
