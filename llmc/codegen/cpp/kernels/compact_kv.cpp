// llmc::compact_kv: keep the rows with the highest scores of a request's cache, in each head for itself.
//
// A row's bytes are copied as they are. The rows that are kept move down, in order, so that no row is written before it
// is read: a place is either the block that holds the same rows, or one that holds none.
#include <algorithm>
#include <cstring>

#include "compaction.h"
#include "row.h"

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

// Larger for larger floats.
uint32_t ordered(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The rows of a head that are kept: those that score more than `least`, and the first `ties` of those that score it.
struct Choice {
  const float* scores;
  int64_t first, last;  // of the rows whose scores count
  uint32_t least = 0;
  int64_t ties = 0;

  // Finds the least score that stays from its highest eight bits down.
  Choice(const float* scores, int64_t first, int64_t last, int64_t kept) : scores(scores), first(first), last(last) {
    ties = kept;
    for (int shift = 24; shift >= 0; shift -= 8) {
      int64_t counts[256] = {};
      for (int64_t row = first; row < last; row++) {
        const uint32_t bits = ordered(scores[row]);
        if (shift == 24 || (bits >> (shift + 8)) == (least >> (shift + 8))) counts[bits >> shift & 255]++;
      }
      uint32_t digit = 255;
      for (; digit > 0 && counts[digit] < ties; digit--) ties -= counts[digit];
      least |= digit << shift;
    }
  }

  bool keeps(int64_t row) {
    if (row < first || row >= last) return true;
    const uint32_t bits = ordered(scores[row]);
    return bits > least || (bits == least && ties-- > 0);
  }
};

void compact_head(const LlmcCompactKv& a, const llmc::Compaction& request, int64_t head) {
  const int64_t size = a.block_size;
  const llmc::StoredRows keys{static_cast<uint8_t*>(a.k_cache), a.kv_heads, head, size, a.key_bytes, a.key_scales};
  const llmc::StoredRows values{static_cast<uint8_t*>(a.v_cache), a.kv_heads, head, size, a.value_bytes, a.value_scales};
  const int64_t scored = request.kept - a.sinks - a.recent;
  Choice choice(a.scores + head * a.longest, a.sinks, request.rows - a.recent, scored);
  int64_t to = 0;
  for (int64_t row = 0; row < request.rows; row++) {
    if (!choice.keeps(row)) continue;
    for (const llmc::StoredRows& each : {keys, values})
      each.copy(request.blocks[row / size], row % size, request.places[to / size], to % size);
    to++;
  }
}

void compact_kv(LlmcPool* pool, const LlmcCompactKv& a) {
  const llmc::Compaction request(a.compaction, a.block_size);
  llmc::parallel_for(pool, a.kv_heads, [&](int64_t head, void*) { compact_head(a, request, head); });
}

}  // namespace

LLMC_KERNEL(LlmcCompactKv, compact_kv, compact_kv)
