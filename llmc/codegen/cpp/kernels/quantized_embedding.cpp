// Embedding lookups in code panels: y[t] = weight[ids[t]], rounded to the element type.
#include "code_panels.h"
#include "thread_pool.h"

namespace llmc {
namespace {


template <class Codes, class T>
void embedding(LlmcPool* pool, const LlmcQuantizedEmbedding& a) {
  const CodePanels panels(a, a.channels);
  parallel_ranges(pool, a.tokens, 8, [&](int64_t begin, int64_t end, void*) {
    for (int64_t t = begin; t < end; t++) {
      const int64_t panel = a.ids[t] / LLMC_PANEL;
      const int lane = static_cast<int>(a.ids[t] % LLMC_PANEL), vector = lane / kLanes * kLanes;
      T* to = static_cast<T*>(a.y.data) + t * a.y.stride;
      for (int64_t k = 0; k < a.channels; k += a.group) {
        const uint8_t* header = panels.header(panel, k);
        const Vec scale = broadcast(load_scales(header, panels.scale_type, vector)[lane - vector]);
        const VecInt zero = VecInt{} + load_zeros(panels, header, vector)[lane - vector];
        const uint8_t* word = panels.codes(panel, k) + lane * 4;
        // kLanes words at a time, one in each lane.
        for (int64_t first = 0; first < a.group; first += kLanes * Codes::kCodes) {
          const int64_t count = std::min<int64_t>(kLanes * Codes::kCodes, a.group - first);
          VecBits words = {};
          for (int64_t i = 0; i * Codes::kCodes < count; i++, word += LLMC_PANEL * 4) {
            uint32_t bits;
            std::memcpy(&bits, word, sizeof bits);
            words[i] = bits;
          }
          T* values = to + k + first;
          for (int j = 0; j < Codes::kCodes; j++) {
            const Vec y = Codes::value(words, j, zero) * scale;
            for (int64_t i = 0, c = Codes::order(j); c < count; i++, c += Codes::kCodes)
              values[c] = from_float<T>(y[i]);
          }
        }
      }
    }
  });
}

template <class T>
void embedding(LlmcPool* pool, const LlmcQuantizedEmbedding& a) {
  switch (static_cast<LlmcCodes>(a.format)) {
    case LLMC_INT8:
      return embedding<Int8Codes, T>(pool, a);
    case LLMC_INT4:
      return embedding<Int4Codes, T>(pool, a);
    case LLMC_FP8:
      return embedding<Fp8Codes, T>(pool, a);
    case LLMC_NF4:
      return embedding<Nf4Codes, T>(pool, a);
    case LLMC_MXFP4:
      return embedding<E2m1Codes, T>(pool, a);
  }
}

}  // namespace
}  // namespace llmc

void llmc_quantized_embedding_f32(LlmcPool* pool, const LlmcQuantizedEmbedding* arguments) {
  llmc::embedding<float>(pool, *arguments);
}

void llmc_quantized_embedding_bf16(LlmcPool* pool, const LlmcQuantizedEmbedding* arguments) {
  llmc::embedding<llmc::bf16>(pool, *arguments);
}
