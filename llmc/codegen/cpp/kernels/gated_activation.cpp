// llmc::gated_activation: y = activation(gate) · up.
#include "activation.h"
#include "row.h"

typedef struct {
  int64_t tokens, channels;
  LlmcRows gate, up, y;
  int32_t activation;
} LlmcGatedActivation;

namespace {

template <class T>
void gated_activation(LlmcPool* pool, const LlmcGatedActivation& a) {
  const auto activation = static_cast<LlmcActivation>(a.activation);
  constexpr int64_t kWork = 4;  // an exp costs about as much as four light elements
  llmc::for_rows(pool, a.tokens, kWork * a.channels, [&](int64_t token) {
    const T* gate = llmc::row_of<const T>(a.gate, token);
    const T* up = llmc::row_of<const T>(a.up, token);
    T* y = llmc::row_of<T>(a.y, token);
    llmc::for_vectors(a.channels, [&](int64_t c, auto lanes) {
      llmc::store(y + c, llmc::activate(activation, llmc::load(gate + c, lanes)) * llmc::load(up + c, lanes), lanes);
    });
  });
}

}  // namespace

LLMC_KERNELS(LlmcGatedActivation, gated_activation, gated_activation)
