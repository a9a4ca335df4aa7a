// llmc::kv_write and llmc::rope_kv_write: this step's keys and values to their slots of the paged cache.
#include "cached_codes.h"

// Caches are [blocks, kv_heads, block_size, dim], contiguous; slot s is row s % block_size of block
// s / block_size. With cos == null nothing is rotated and q, q_out are not used (llmc::kv_write); otherwise
// llmc::rope_kv_write, where q_out may be q.
typedef struct {
  int64_t tokens, heads, kv_heads, head_dim, value_dim, half, block_size;
  int32_t interleaved;
  LlmcRows q, k, v;
  const float* cos;
  const float* sin;
  void* k_cache;
  void* v_cache;
  const int32_t* slot_mapping;  // [tokens]
  LlmcRows q_out;
  int64_t cache_group;  // of codes: channels of keys that share a scale; 0: all of a head's
  int64_t value_group;  // the same of values
} LlmcKvWrite;

namespace {

template <class T, class K, class V = K>
void kv_write(LlmcPool* pool, const LlmcKvWrite& a) {
  const bool rotates = a.cos != nullptr;
  const int64_t heads = rotates ? a.heads : 0;
  const int64_t work = (heads + a.kv_heads) * a.head_dim + a.kv_heads * a.value_dim;
  const llmc::Cache<K> keys(a.head_dim, a.block_size, a.cache_group);
  const llmc::Cache<V> values(a.value_dim, a.block_size, a.value_group);
  llmc::for_rows(pool, a.tokens, work, [&](int64_t token) {
    const int64_t angles = rotates ? token * a.half : 0;
    const llmc::Rotation none{}, given{a.cos + angles, a.sin + angles, a.half, a.interleaved != 0};
    const llmc::Rotation& rotation = rotates ? given : none;
    for (int64_t head = 0; head < heads; head++) {
      const int64_t c = head * a.head_dim;
      llmc::rotate(rotation, a.head_dim, llmc::row_of<const T>(a.q, token) + c, llmc::row_of<T>(a.q_out, token) + c);
    }
    const int64_t block = a.slot_mapping[token] / a.block_size;
    const int64_t in_block = a.slot_mapping[token] % a.block_size;
    for (int64_t head = 0; head < a.kv_heads; head++) {
      const int64_t of_block = block * a.kv_heads + head;
      const T* k = llmc::row_of<const T>(a.k, token) + head * a.head_dim;
      const T* v = llmc::row_of<const T>(a.v, token) + head * a.value_dim;
      const auto* k_block = static_cast<const uint8_t*>(a.k_cache) + of_block * keys.head_bytes();
      const auto* v_block = static_cast<const uint8_t*>(a.v_cache) + of_block * values.head_bytes();
      llmc::write_row(keys, rotation, k, keys.row(k_block, in_block));
      llmc::write_row(values, none, v, values.row(v_block, in_block));
    }
  });
}

}  // namespace

LLMC_KERNEL(LlmcKvWrite, kv_write_f32_f32, kv_write<float, float>)
LLMC_KERNEL(LlmcKvWrite, kv_write_f32_bf16, kv_write<float, llmc::bf16>)
LLMC_KERNEL(LlmcKvWrite, kv_write_f32_int8, kv_write<float, llmc::Int8Cache>)
LLMC_KERNEL(LlmcKvWrite, kv_write_f32_int4, kv_write<float, llmc::Int4Cache>)
LLMC_KERNEL(LlmcKvWrite, kv_write_f32_fp8, kv_write<float, llmc::Fp8Cache>)
LLMC_KERNEL(LlmcKvWrite, kv_write_f32_int8_int4, kv_write<float, llmc::Int8Cache, llmc::Int4Cache>)
LLMC_KERNEL(LlmcKvWrite, kv_write_bf16_f32, kv_write<llmc::bf16, float>)
LLMC_KERNEL(LlmcKvWrite, kv_write_bf16_bf16, kv_write<llmc::bf16, llmc::bf16>)
LLMC_KERNEL(LlmcKvWrite, kv_write_bf16_int8, kv_write<llmc::bf16, llmc::Int8Cache>)
LLMC_KERNEL(LlmcKvWrite, kv_write_bf16_int4, kv_write<llmc::bf16, llmc::Int4Cache>)
LLMC_KERNEL(LlmcKvWrite, kv_write_bf16_fp8, kv_write<llmc::bf16, llmc::Fp8Cache>)
LLMC_KERNEL(LlmcKvWrite, kv_write_bf16_int8_int4, kv_write<llmc::bf16, llmc::Int8Cache, llmc::Int4Cache>)
