// llmc::paged_attention's arguments, and which keys of a request its queries see: a window, a chunk, pinned keys.
#pragma once
#include <algorithm>

#include "softmax.h"
#include "visible_rows.h"

// llmc::paged_attention; prefill chunks, decodes and trees mixed. The bits of a request's rows depend neither on its
// neighbours nor on where its prefill is cut nor on the number of threads; those of a tree's rows are what their paths
// alone would give. With bf16 activations and caches, on processors that multiply bf16, probabilities too are rounded to
// bf16 before they multiply values.
typedef struct {
  int64_t tokens, requests, heads, kv_heads, head_dim, value_dim, block_size;
  LlmcRows q;  // [tokens, heads * head_dim]
  const void* k_cache;
  const void* v_cache;
  const int32_t* query_starts;  // [requests + 1]
  const int32_t* context_lens;  // [requests]
  const int32_t* block_tables;  // [requests, max_blocks]
  int64_t max_blocks;
  float scale;
  int64_t window;      // positions seen, itself included; 0: all
  float softcap;       // 0: none
  const float* sinks;  // [heads], or [tokens, heads], or null
  LlmcRows y;          // [tokens, heads * value_dim]
  int64_t cache_group, value_group;  // as in LlmcKvWrite
  const int64_t* tree_masks;  // [tokens], bit d: the row d before a token's own is hidden from it; null: none is
  const float* slopes;  // [heads], what a position farther back takes off a score; null: nothing
  int64_t chunk;        // no key before the multiple of it at or before the query's own place is seen; 0: all are
  int64_t latent;       // channels at the end of a key that are its value's, and in no other cache: value_dim or 0
  LlmcRows k, v;        // where there is no cache: of the step's tokens, [tokens, kv_heads * head_dim or value_dim]; then
                        // each token sees all of its request, or those nearer than the window
  int64_t sink_stride;  // from one token's sinks to the next one's; 0: all have the same
  const float* bias;    // [tokens, heads, extent], by distance between query and key, added to the score; null: nothing
  int64_t extent;
  LlmcRows chosen;      // [tokens, chosen_count] int32, in order: places of the keys that a token sees; null: all
  int64_t chosen_count;
  int64_t pinned;       // keys in places before it are seen whatever window and chunk say; 0: none
  // A query reads its newest keys, its own included, from these caches of numbers, and older ones from k_cache and
  // v_cache. The last rows of both tables are those of the same tokens.
  const void* recent_k;
  const void* recent_v;
  const int32_t* recent_tables;  // [requests, max_blocks]
  int64_t recent;       // number of them; 0: all keys are in k_cache and v_cache
  const int32_t* recent_lens;  // [requests], a request's rows in these caches; null: context_lens
} LlmcPagedAttention;

namespace llmc {

constexpr int64_t kAttentionRange = 1024;

// Whether keys and values are those of the step, which no query is before or behind.
inline bool both_ways(const LlmcPagedAttention& a) { return a.k.data != nullptr; }

// Number of cached rows of a request, with the rows of this step.
inline int64_t cached_rows(const LlmcPagedAttention& a, int64_t request) {
  return both_ways(a) ? a.query_starts[request + 1] - a.query_starts[request] : a.context_lens[request];
}

// The masks of a request's tokens, null if they hide nothing. The last token of a tree never sees all others.
inline const int64_t* tree_of(const LlmcPagedAttention& a, int64_t request) {
  const int64_t begin = a.query_starts[request], end = a.query_starts[request + 1];
  return a.tree_masks == nullptr || begin == end || a.tree_masks[end - 1] == 0 ? nullptr : a.tree_masks + begin;
}

// The first key that a query at this place sees, after the pinned keys.
inline int64_t first_seen(const LlmcPagedAttention& a, int64_t place) {
  const int64_t by_window = a.window == 0 ? 0 : place - a.window + 1;
  const int64_t by_chunk = a.chunk == 0 ? 0 : place - place % a.chunk;
  return std::max({int64_t{0}, by_window, by_chunk});
}

// Behind the last key that a query in this place sees in k_cache, of `all`.
inline int64_t end_seen(const LlmcPagedAttention& a, int64_t place, int64_t all) {
  if (!both_ways(a)) return std::max<int64_t>(0, place + 1 - a.recent);
  return a.window == 0 ? all : std::min(all, place + a.window);
}

// Places of the keys before `end` that any of a request's tokens from `first_row` on may see.
inline Keys seen_from(const LlmcPagedAttention& a, const int64_t* tree, int64_t first_row, int64_t end) {
  const int64_t first = first_seen(a, std::max<int64_t>(0, first_row - (tree == nullptr ? 0 : VisibleRows::kReach)));
  return {first, std::max(first, end)};
}

// Attention over the newest keys alone.
inline LlmcPagedAttention of_newest(const LlmcPagedAttention& a) {
  LlmcPagedAttention newest = a;
  newest.k_cache = a.recent_k;
  newest.v_cache = a.recent_v;
  newest.block_tables = a.recent_tables;
  if (a.recent_lens != nullptr) newest.context_lens = a.recent_lens;
  newest.window = a.window == 0 ? a.recent : std::min(a.window, a.recent);
  newest.cache_group = newest.value_group = newest.pinned = newest.recent = 0;
  return newest;
}

// The ranges of keys that a tile reads which sees `keys`: first those with pinned keys, then those from its window on.
inline int64_t pinned_ranges(const LlmcPagedAttention& a, const Keys& keys) {
  return std::min((a.pinned + kAttentionRange - 1) / kAttentionRange, keys.first / kAttentionRange);
}
inline int64_t ranges_of(const LlmcPagedAttention& a, const Keys& keys) {
  const int64_t last = (keys.last + kAttentionRange - 1) / kAttentionRange;
  return pinned_ranges(a, keys) + last - keys.first / kAttentionRange;
}
inline int64_t range_of(const LlmcPagedAttention& a, const Keys& keys, int64_t index) {
  const int64_t pinned = pinned_ranges(a, keys);
  return index < pinned ? index : keys.first / kAttentionRange + index - pinned;
}

}  // namespace llmc
