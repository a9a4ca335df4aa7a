// Embedding lookups in code panels: y[t] = weight[ids[t]], rounded to the element type.
#include "code_planes.h"
#include "kernel.h"
#include "thread_pool.h"

// y[t] = weight[ids[t]]                                            (llmc::quantized_embedding)
typedef struct {
  int64_t tokens, channels, group;
  const int32_t* ids;
  const void* weight;  // code panels
  LlmcRows y;
  int32_t format, scale_type, has_zeros, is_sparse;
} LlmcQuantizedEmbedding;

namespace llmc {
namespace {

// The smallest unit of words that holds whole codes: kCodes codes; the j-th one belongs to k = order(j).
template <class Codes>
struct OneWord {
  static constexpr int kWords = 1, kCodes = Codes::kCodes;
  static constexpr int order(int j) { return Codes::order(j); }
  static Vec value(const VecBits (&unit)[1], int j, VecInt zero) { return Codes::value(unit[0], j, zero); }
};

template <int kLow, int kMore, bool kTable = false>
struct Planes {
  static constexpr int kWords = kLow + kMore, kCodes = 32;
  static constexpr int order(int j) { return j; }
  static Vec value(const VecBits (&unit)[kWords], int j, VecInt zero) {
    return Int8Codes::value(joined<kLow, kMore, kTable>([&](int at) { return unit[at]; }, j / 4), j % 4, zero);
  }
};

template <class Unit, class T>
void embedding(LlmcPool* pool, const LlmcQuantizedEmbedding& a) {
  const CodePanels panels(a, a.channels);
  parallel_each(pool, a.tokens, 8, [&](int64_t t) {
    const int64_t panel = a.ids[t] / LLMC_PANEL;
    const int lane = static_cast<int>(a.ids[t] % LLMC_PANEL), vector = lane / kLanes * kLanes;
    T* to = static_cast<T*>(a.y.data) + t * a.y.stride;
    for (int64_t k = 0; k < a.channels; k += a.group) {
      const uint8_t* header = panels.header(panel, k);
      const Vec scale = broadcast(load_scales(header, panels.scale_type, vector)[lane - vector]);
      const VecInt zero = VecInt{} + load_zeros(panels, header, vector)[lane - vector];
      const uint8_t* word = panels.codes(panel, k) + lane * 4;
      // kLanes units at a time, one in each lane.
      for (int64_t first = 0; first < a.group; first += kLanes * Unit::kCodes) {
        const int64_t count = std::min<int64_t>(kLanes * Unit::kCodes, a.group - first);
        VecBits units[Unit::kWords] = {};
        for (int64_t i = 0; i * Unit::kCodes < count; i++)
          for (int j = 0; j < Unit::kWords; j++, word += LLMC_PANEL * 4) {
            uint32_t bits;
            std::memcpy(&bits, word, sizeof bits);
            units[j][i] = bits;
          }
        T* values = to + k + first;
        for (int j = 0; j < Unit::kCodes; j++) {
          const Vec y = Unit::value(units, j, zero) * scale;
          for (int64_t i = 0, c = Unit::order(j); c < count; i++, c += Unit::kCodes)
            values[c] = from_float<T>(y[i]);
        }
      }
    }
  });
}

// Embedding for a blocked format, whose units may hold codes of several groups.
template <class Unit, class T>
void blocked_embedding(LlmcPool* pool, const LlmcQuantizedEmbedding& a) {
  const CodePanels panels(a, a.channels);
  const VecInt zero = VecInt{} + panels.usual_zero();
  parallel_each(pool, a.tokens, 8, [&](int64_t t) {
    const int64_t panel = a.ids[t] / LLMC_PANEL;
    const int lane = static_cast<int>(a.ids[t] % LLMC_PANEL), vector = lane / kLanes * kLanes;
    T* to = static_cast<T*>(a.y.data) + t * a.y.stride;
    for (int64_t k = 0; k < a.channels; k += panels.group) {
      const ScaleAndMinimum found =
          scale_and_minimum(panels, panels.header(panel, k), k % panels.run / panels.group, vector);
      const float scale = found.scale[lane - vector], minimum = found.minimum[lane - vector];
      // The words that hold the group, one of them in the first lane.
      const int64_t first = k / Unit::kCodes * Unit::kCodes;
      for (int64_t unit = first; unit < k + panels.group; unit += Unit::kCodes) {
        const uint8_t* word = panels.codes(panel, unit) + lane * 4;
        VecBits units[Unit::kWords] = {};
        for (int j = 0; j < Unit::kWords; j++) {
          uint32_t bits;
          std::memcpy(&bits, word + j * LLMC_PANEL * 4, sizeof bits);
          units[j][0] = bits;
        }
        for (int j = 0; j < Unit::kCodes; j++) {
          const int64_t c = unit + Unit::order(j);
          if (c < k || c >= k + panels.group) continue;
          const float value = Unit::value(units, j, zero)[0] * scale;
          to[c] = from_float<T>(panels.record.has_minimum ? value - minimum : value);
        }
      }
    }
  });
}

template <class T>
void embedding(LlmcPool* pool, const LlmcQuantizedEmbedding& a) {
  switch (static_cast<LlmcCodes>(a.format)) {
    case LLMC_INT8:
      return embedding<OneWord<Int8Codes>, T>(pool, a);
    case LLMC_INT6:
      return embedding<Planes<4, 2>, T>(pool, a);
    case LLMC_INT5:
      return embedding<Planes<4, 1>, T>(pool, a);
    case LLMC_INT4:
      return embedding<OneWord<Int4Codes>, T>(pool, a);
    case LLMC_FP8:
      return embedding<OneWord<Fp8Codes>, T>(pool, a);
    case LLMC_NF4:
      return embedding<OneWord<Nf4Codes>, T>(pool, a);
    case LLMC_MXFP4:
      return embedding<OneWord<E2m1Codes>, T>(pool, a);
    case LLMC_Q4_1:
    case LLMC_Q4_K:
      return blocked_embedding<OneWord<Int4Codes>, T>(pool, a);
    case LLMC_Q2_K:
      return blocked_embedding<Planes<2, 0>, T>(pool, a);
    case LLMC_Q3_K:
      return blocked_embedding<Planes<2, 1>, T>(pool, a);
    case LLMC_Q5_1:
    case LLMC_Q5_K:
      return blocked_embedding<Planes<4, 1>, T>(pool, a);
    case LLMC_Q6_K:
      return blocked_embedding<Planes<4, 2>, T>(pool, a);
    case LLMC_IQ4_NL:
    case LLMC_IQ4_XS:
      return blocked_embedding<Planes<4, 0, true>, T>(pool, a);
  }
}

}  // namespace
}  // namespace llmc

LLMC_KERNELS(LlmcQuantizedEmbedding, quantized_embedding, llmc::embedding)
