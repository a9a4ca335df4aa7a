// Products and lookups of weights that a function yields row by row, for storages without kernels of their own.
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

// Which row of the weight is a lane of a panel; none: -1. Gated panels hold as many gate rows as rows of up.
inline int64_t row_of_lane(int64_t panel, int64_t lane, int64_t out, bool gated) {
  if (!gated) return panel * LLMC_PANEL + lane < out ? panel * LLMC_PANEL + lane : -1;
  const int64_t half = LLMC_PANEL / 2, row = panel * half + lane % half;
  return row >= out ? -1 : lane < half ? row : row + out;
}

// to[k][lane]
inline void decode_rows(const RowReader& read, const LlmcRowLinear& a, int64_t panel, bool gated, int64_t k,
                        int64_t count, float* to) {
  float row[kBlockIn<float>];
  for (int64_t lane = 0; lane < LLMC_PANEL; lane++) {
    const int64_t number = row_of_lane(panel, lane, a.out, gated);
    if (number < 0)
      std::fill_n(row, count, 0.0f);
    else
      read(a.first_row + number, k, count, row);
    for (int64_t i = 0; i < count; i++) to[i * LLMC_PANEL + lane] = row[i];
  }
}

template <class T, class Epilogue>
void row_product(LlmcPool* pool, const LlmcRowLinear& a, bool gated, const Epilogue& epilogue) {
  constexpr int64_t kIn = kBlockIn<float>;
  const RowReader read(a);
  const int64_t panels = (epilogue.weight_rows() + LLMC_PANEL - 1) / LLMC_PANEL;
  for (int64_t start = 0; start < a.tokens; start += kBlockTokens) {
    const int64_t tokens = std::min(kBlockTokens, a.tokens - start);
    const Tiles tiles(tokens, PanelProduct<float>::kTokens);
    // The tiles of one block of k lie together: that is the order in which they are read.
    auto* packed = static_cast<float*>(pool->scratch(0));
    parallel_for(pool, tiles.count, [&](int64_t tile, void*) {
      const int64_t first = tiles.start(tile), height = tiles.height_of(tile);
      for (int64_t t = 0; t < height; t++) {
        const T* row = x_row<T>(a, start + first + t);
        for (int64_t k = 0; k < a.in; k++) {
          const int64_t block = k / kIn * kIn, count = std::min(kIn, a.in - block);
          packed[block * tokens + first * count + (k - block) * height + t] = to_float(row[k]);
        }
      }
    });
    parallel_for(pool, panels, [&](int64_t panel, void* scratch) {
      auto* sums = static_cast<float*>(scratch) + tokens * packed_floats(a.in);
      float* weight = sums + tokens * LLMC_PANEL;
      TileProduct<float> multiply;
      for (int64_t k = 0; k < a.in; k += kIn) {
        const int64_t count = std::min(kIn, a.in - k);
        decode_rows(read, a, panel, gated, k, count, weight);
        for (int64_t tile = 0; tile < tiles.count; tile++) {
          const float* values = packed + k * tokens + tiles.start(tile) * count;
          float* of_tile = sums + tiles.start(tile) * LLMC_PANEL;
          multiply(tiles.height_of(tile), weight, values, count, of_tile, k == 0, weight, 0);
        }
      }
      for (int64_t t = 0; t < tokens; t++) epilogue(start + t, panel, sums + t * LLMC_PANEL);
    });
  }
}

template <class T>
void row_linear(LlmcPool* pool, const LlmcRowLinear& a) {
  row_product<T>(pool, a, false, LinearEpilogue<T, LlmcRowLinear>{a});
}

template <class T>
void row_gated_linear(LlmcPool* pool, const LlmcRowLinear& a) {
  row_product<T>(pool, a, true, GatedEpilogue<T, LlmcRowLinear>{a});
}

template <class T>
void row_expert_linear(LlmcPool* pool, const LlmcRowLinear& a) {
  for_experts<T>(a, [&](int64_t expert, LlmcRowLinear one) {
    one.first_row = expert * a.out;
    row_linear<T>(pool, one);
  });
}

template <class T>
void row_lm_head(LlmcPool* pool, const LlmcRowLinear& a) {
  row_product<T>(pool, a, false, LinearEpilogue<float, LlmcRowLinear>{a});
}

template <class T>
void row_embedding(LlmcPool* pool, const LlmcRowEmbedding& a) {
  constexpr int64_t kMost = kBlockIn<float>;
  const RowReader read(a);
  parallel_ranges(pool, a.tokens, 8, [&](int64_t begin, int64_t end, void*) {
    float values[kMost];
    for (int64_t t = begin; t < end; t++)
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
LLMC_KERNELS(LlmcRowLinear, row_lm_head, llmc::row_lm_head)
LLMC_KERNELS(LlmcRowEmbedding, row_embedding, llmc::row_embedding)
