// Rows of weights that are stored as a bit for each element and the elements that are not zero (llmc::bitmask).
#include "kernel.h"

LLMC_EXPORT void llmc_rows_bitmask(const LlmcStoredRows* parts, int64_t row, int64_t k, int64_t count, float* to) {
  const auto* mask = static_cast<const uint32_t*>(parts[0].data) + row * parts[0].stride;
  const auto* value = static_cast<const llmc::bf16*>(parts[1].data) + row * parts[1].stride;
  for (int64_t word = 0; word < k / 32; word++) value += __builtin_popcount(mask[word]);
  value += __builtin_popcount(mask[k / 32] & ((1u << (k % 32)) - 1));
  for (int64_t i = k; i < k + count; i++) *to++ = (mask[i / 32] >> (i % 32) & 1u) != 0 ? llmc::to_float(*value++) : 0.0f;
}
