// llmc::kv_write and llmc::rope_kv_write: this step's keys and values to their slots of the paged cache.
#include "rope.h"

namespace {

template <class T, class U>
void copy_row(const T* x, int64_t channels, U* y) {
  llmc::for_vectors(channels, [&](int64_t c, auto lanes) { llmc::store(y + c, llmc::load(x + c, lanes), lanes); });
}

template <class T, class U>
void kv_write(LlmcPool* pool, const LlmcKvWrite& a) {
  const bool rotates = a.cos != nullptr;
  const int64_t heads = rotates ? a.heads : 0;
  const int64_t work = (heads + a.kv_heads) * a.head_dim + a.kv_heads * a.value_dim;
  llmc::for_rows(pool, a.tokens, work, [&](int64_t token) {
    const int64_t angles = rotates ? token * a.half : 0;
    const llmc::Rotation rotation{a.cos + angles, a.sin + angles, a.half, a.interleaved != 0};
    for (int64_t head = 0; head < heads; head++) {
      const int64_t c = head * a.head_dim;
      llmc::rotate(rotation, a.head_dim, llmc::row_of<const T>(a.q, token) + c, llmc::row_of<T>(a.q_out, token) + c);
    }
    const int64_t block = a.slot_mapping[token] / a.block_size;
    const int64_t position = a.slot_mapping[token] % a.block_size;
    for (int64_t head = 0; head < a.kv_heads; head++) {
      const int64_t row = (block * a.kv_heads + head) * a.block_size + position;
      const T* k = llmc::row_of<const T>(a.k, token) + head * a.head_dim;
      const T* v = llmc::row_of<const T>(a.v, token) + head * a.value_dim;
      U* cached_k = static_cast<U*>(a.k_cache) + row * a.head_dim;
      if (rotates)
        llmc::rotate(rotation, a.head_dim, k, cached_k);
      else
        copy_row(k, a.head_dim, cached_k);
      copy_row(v, a.value_dim, static_cast<U*>(a.v_cache) + row * a.value_dim);
    }
  });
}

}  // namespace

void llmc_kv_write_f32_f32(LlmcPool* pool, const LlmcKvWrite* arguments) { kv_write<float, float>(pool, *arguments); }
void llmc_kv_write_f32_bf16(LlmcPool* pool, const LlmcKvWrite* arguments) {
  kv_write<float, llmc::bf16>(pool, *arguments);
}
void llmc_kv_write_bf16_f32(LlmcPool* pool, const LlmcKvWrite* arguments) {
  kv_write<llmc::bf16, float>(pool, *arguments);
}
void llmc_kv_write_bf16_bf16(LlmcPool* pool, const LlmcKvWrite* arguments) {
  kv_write<llmc::bf16, llmc::bf16>(pool, *arguments);
}
