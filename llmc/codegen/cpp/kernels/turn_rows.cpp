// llmc::turn_rows: move the latest rows of a request's cache up, and turn their keys back (llmc/ops/turn_rows.py).
//
// Rows move to lower ones, in order, so that no row is written before it is read: a place is either the block that holds
// the same rows, or one that holds none.
#include <cmath>

#include "cached_codes.h"
#include "compaction.h"

typedef struct {
  int64_t kv_heads, block_size, head_dim, half;
  int32_t interleaved;
  void* k_cache;
  void* v_cache;
  int64_t key_bytes, value_bytes;    // of a row of one head, without scales
  int64_t key_scales, value_scales;  // of 2 bytes, of a row of one head
  const int32_t* compaction;
  const float* inv_freq;  // [half]
  int64_t sinks;
  int64_t cache_group;  // of codes: channels that share a scale; 0: all of a head's
} LlmcTurnRows;

namespace {

template <class K>
void turn_head(const LlmcTurnRows& a, const llmc::Compaction& request, const llmc::Rotation& back, int64_t head) {
  const int64_t size = a.block_size, shift = request.rows - request.kept;
  const llmc::StoredRows keys{static_cast<uint8_t*>(a.k_cache), a.kv_heads, head, size, a.key_bytes, a.key_scales};
  const llmc::StoredRows values{static_cast<uint8_t*>(a.v_cache), a.kv_heads, head, size, a.value_bytes, a.value_scales};
  const llmc::Cache<K> cache(a.head_dim, size, a.cache_group);
  float key[LLMC_CODED_HEAD];
  for (int64_t to = 0; to < request.kept; to++) {
    const int64_t from = to < a.sinks ? to : to + shift;
    const int64_t source = request.blocks[from / size], place = request.places[to / size];
    if (from == to && source == place) continue;
    values.copy(source, from % size, place, to % size);
    if (to < a.sinks) {
      keys.copy(source, from % size, place, to % size);
    } else {
      llmc::decode(cache, cache.row(keys.block(source), from % size), key);
      llmc::write_row(cache, back, key, cache.row(keys.block(place), to % size));
    }
  }
}

template <class K>
void turn_rows(LlmcPool* pool, const LlmcTurnRows& a) {
  const llmc::Compaction request(a.compaction, a.block_size);
  float cos[LLMC_CODED_HEAD], sin[LLMC_CODED_HEAD];
  for (int64_t i = 0; i < a.half; i++) {
    const float angle = static_cast<float>(request.kept - request.rows) * a.inv_freq[i];
    cos[i] = std::cos(angle);
    sin[i] = std::sin(angle);
  }
  const llmc::Rotation back{cos, sin, a.half, a.interleaved != 0};
  llmc::parallel_for(pool, a.kv_heads, [&](int64_t head, void*) { turn_head<K>(a, request, back, head); });
}

}  // namespace

LLMC_KERNEL(LlmcTurnRows, turn_rows_f32, turn_rows<float>)
LLMC_KERNEL(LlmcTurnRows, turn_rows_bf16, turn_rows<llmc::bf16>)
LLMC_KERNEL(LlmcTurnRows, turn_rows_int8, turn_rows<llmc::Int8Cache>)
LLMC_KERNEL(LlmcTurnRows, turn_rows_int4, turn_rows<llmc::Int4Cache>)
LLMC_KERNEL(LlmcTurnRows, turn_rows_fp8, turn_rows<llmc::Fp8Cache>)
