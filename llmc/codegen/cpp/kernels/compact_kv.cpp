// llmc::compact_kv: keep the rows with the highest scores of a request's cache, separately for each head.
//
// A row's bytes are copied as they are. The rows that are kept move down, in order, so that no row is written before it
// is read: a place is either the block that holds the same rows, or one that holds none.
#include "compaction.h"
#include "row.h"
#include "row_choice.h"

typedef struct {
  int64_t kv_heads, block_size, longest;
  void* k_cache;
  void* v_cache;
  int64_t key_bytes, value_bytes;    // of a row of one head, without scales
  int64_t key_scales, value_scales;  // of 2 bytes, of a row of one head
  const float* scores;               // [kv_heads, longest]
  const int32_t* compaction;
  int64_t sinks, recent;
} LlmcCompactKv;

namespace {

void compact_head(const LlmcCompactKv& a, const llmc::Compaction& request, int64_t head) {
  const int64_t size = a.block_size;
  const llmc::StoredRows keys{static_cast<uint8_t*>(a.k_cache), a.kv_heads, head, size, a.key_bytes, a.key_scales};
  const llmc::StoredRows values{static_cast<uint8_t*>(a.v_cache), a.kv_heads, head, size, a.value_bytes, a.value_scales};
  const int64_t scored = request.kept - a.sinks - a.recent;
  llmc::RowChoice choice(a.scores + head * a.longest, a.sinks, request.rows - a.recent, scored);
  int64_t to = 0;
  for (int64_t row = 0; row < request.rows; row++) {
    if (!choice.keeps(row)) continue;
    const int64_t source = request.blocks[row / size], place = request.places[to / size];
    for (const llmc::StoredRows& each : {keys, values}) {
      if (row != to || source != place) each.copy(source, row % size, place, to % size);
    }
    to++;
  }
}

void compact_kv(LlmcPool* pool, const LlmcCompactKv& a) {
  const llmc::Compaction request(a.compaction, a.block_size);
  llmc::parallel_for(pool, a.kv_heads, [&](int64_t head, void*) { compact_head(a, request, head); });
}

}  // namespace

LLMC_KERNEL(LlmcCompactKv, compact_kv, compact_kv)
