// llmc::paged_attention: shares a ragged batch among the threads, tile by tile.
//
// An item is a tile of rows. Where one item would outlast the others (a long context in a small batch), its ranges of
// keys become separate items: their results are kept side by side in the threads' scratch and joined in order
// afterwards, as one thread would have joined them.
#pragma once
#include "attention_tile.h"

namespace llmc::attention {

constexpr int64_t kPartFloats = 1 << 17;      // of each thread, for parts of split tiles
constexpr int64_t kSerialWork = 1 << 16;      // products of a query and a key channel that one thread does sooner
constexpr int64_t kItemsPerThread = 2;        // that a split aims at

// How the batch is cut. Pure data: every thread derives the same items from it.
struct Plan {
  const LlmcPagedAttention& a;
  const LlmcPagedAttention* newest;  // attention over the newest keys, where they are apart; else null
  int64_t max_heads;   // KV heads in a tile
  int64_t split_keys;  // a request whose tiles see more keys than that is split
  int64_t part_rows;   // of the largest split tile
  int64_t parts_per_thread;

  // Rows of one KV head, cut into tiles along the tokens; where they all fit, a tile takes in several heads.
  int64_t rows(int64_t r) const { return (a.query_starts[r + 1] - a.query_starts[r]) * (a.heads / a.kv_heads); }
  int64_t tiles_of_head(int64_t r) const { return (rows(r) + kAttentionRows - 1) / kAttentionRows; }
  int64_t heads(int64_t r) const {
    return std::clamp<int64_t>(kAttentionRows / std::max<int64_t>(1, rows(r)), 1, max_heads);
  }
  int64_t spans(int64_t r) const { return (a.kv_heads + heads(r) - 1) / heads(r); }
  int64_t tiles(int64_t r) const { return spans(r) * tiles_of_head(r); }
  static Keys keys(const LlmcPagedAttention& of, int64_t r) {
    const int64_t rows = cached_rows(of, r);
    const int64_t first_own = rows - (of.query_starts[r + 1] - of.query_starts[r]);
    return seen_from(of, tree_of(of, r), first_own, end_seen(of, rows - 1, rows));
  }
  static int64_t seen(const LlmcPagedAttention& of, int64_t r) {
    const Keys found = keys(of, r);
    return found.last - found.first + std::min(of.pinned, found.first);
  }
  // How many keys its tiles may see, with those that are pinned.
  int64_t seen(int64_t r) const { return seen(a, r) + (newest == nullptr ? 0 : seen(*newest, r)); }
  // Where all of its tiles see the same keys: of one token, or in one tile.
  bool split(int64_t r) const {
    const bool alike = tiles_of_head(r) == 1 || a.query_starts[r + 1] - a.query_starts[r] == 1;
    return alike && seen(r) > split_keys;
  }
  int64_t ranges(int64_t r) const {
    return ranges_of(a, keys(a, r)) + (newest == nullptr ? 0 : ranges_of(*newest, keys(*newest, r)));
  }
  int64_t items(int64_t r) const { return tiles(r) * (split(r) ? ranges(r) : 1); }
  int64_t parts(int64_t r) const { return split(r) ? items(r) : 0; }

  // Later tiles along the tokens see more keys: the longest first leave the least to wait for at the end.
  RowTile tile(int64_t r, int64_t index) const {
    const int64_t kv_head = index / tiles_of_head(r) * heads(r);
    const int64_t first_row = (tiles_of_head(r) - 1 - index % tiles_of_head(r)) * kAttentionRows;
    return {r, kv_head, std::min(heads(r), a.kv_heads - kv_head), first_row,
            std::min(kAttentionRows, rows(r) - first_row)};
  }

  SoftmaxPart part(LlmcPool* pool, int64_t index) const;
};

// A thread's place in the list of requests: indices are claimed in ascending order, so it only moves forward.
struct Cursor {
  int64_t request;
  int64_t first_item;  // of the request
  int64_t first_part;
};

struct ThreadMemory {
  Cursor* cursor;
  float* parts;
  TileMemory tile;

  static constexpr int64_t kCursorFloats = 16;
  static_assert(sizeof(Cursor) <= kCursorFloats * sizeof(float));
  ThreadMemory(void* scratch, const LlmcPagedAttention& a)
      : cursor(static_cast<Cursor*>(scratch)),
        parts(static_cast<float*>(scratch) + kCursorFloats),
        tile(parts + kPartFloats, a.head_dim, a.value_dim) {}
};

inline int64_t scratch_bytes(int64_t head_dim, int64_t value_dim) {
  const int64_t floats = ThreadMemory::kCursorFloats + kPartFloats + TileMemory::floats(head_dim, value_dim);
  return floats * static_cast<int64_t>(sizeof(float));
}

inline SoftmaxPart Plan::part(LlmcPool* pool, int64_t index) const {
  const ThreadMemory owner(pool->scratch(static_cast<int32_t>(index / parts_per_thread)), a);
  const int64_t stride = padded_to_lanes(a.value_dim);
  return {owner.parts + index % parts_per_thread * SoftmaxPart::floats(part_rows, stride), part_rows, stride};
}

// A plan whose tiles have at most max_heads heads, and which splits tiles into ranges if `splits`.
inline Plan cut_plan(LlmcPool* pool, const LlmcPagedAttention& a, const LlmcPagedAttention* newest, int64_t max_heads,
                     bool splits) {
  constexpr int64_t kNever = INT64_MAX;
  const int64_t items = kItemsPerThread * pool->threads();
  Plan plan{a, newest, std::max<int64_t>(1, max_heads), kNever, 0, 0};
  if (!splits) return plan;
  int64_t work = 0;
  for (int64_t r = 0; r < a.requests; r++) work += plan.tiles(r) * plan.seen(r);
  plan.split_keys = std::max(kAttentionRange, work / items);
  for (int64_t r = 0; r < a.requests; r++)
    if (plan.split(r)) plan.part_rows = std::max(plan.part_rows, plan.heads(r) * std::min(kAttentionRows, plan.rows(r)));
  if (plan.part_rows > 0)
    plan.parts_per_thread = kPartFloats / SoftmaxPart::floats(plan.part_rows, padded_to_lanes(a.value_dim));
  return plan;
}

// Where ranges give the threads enough to do, tiles take in all heads: then a block is read from beginning to end.
inline Plan make_plan(LlmcPool* pool, const LlmcPagedAttention& a, const LlmcPagedAttention* newest) {
  const int64_t items = kItemsPerThread * pool->threads();
  const Plan whole{a, newest, 1, 0, 0, 0};
  int64_t ranges = 0, parts = 0;
  for (int64_t r = 0; r < a.requests; r++) ranges += whole.split(r) ? std::max<int64_t>(1, whole.seen(r) / kAttentionRange) : 1;
  const Plan plan = cut_plan(pool, a, newest, ranges * a.kv_heads / items, true);
  for (int64_t r = 0; r < a.requests; r++) parts += plan.parts(r);
  const bool has_room = parts <= plan.parts_per_thread * pool->threads();
  return has_room ? plan : cut_plan(pool, a, newest, a.requests * a.kv_heads / items, false);
}

// Moves to the request that item `index` belongs to, when each request has items(request) of them.
template <class Items>
void advance(const Plan& plan, int64_t index, const Items& items, Cursor& cursor) {
  for (;;) {
    const int64_t count = items(cursor.request);
    if (index < cursor.first_item + count) return;
    cursor.first_item += count;
    cursor.first_part += plan.parts(cursor.request);
    cursor.request++;
  }
}

// Calls body(cursor, item of the request, memory) for every item of every request.
template <class Items, class Body>
void for_items(LlmcPool* pool, const Plan& plan, const Items& items, const Body& body) {
  int64_t count = 0, work = 0;
  for (int64_t r = 0; r < plan.a.requests; r++) {
    count += items(r);
    work += plan.rows(r) * cached_rows(plan.a, r) * plan.a.kv_heads * plan.a.head_dim;
  }
  for (int32_t thread = 0; thread < pool->threads(); thread++)
    *ThreadMemory(pool->scratch(thread), plan.a).cursor = Cursor{0, 0, 0};
  const auto run = [&](int64_t index, void* scratch) {
    const ThreadMemory memory(scratch, plan.a);
    advance(plan, index, items, *memory.cursor);
    body(*memory.cursor, index - memory.cursor->first_item, memory.tile);
  };
  if (work < kSerialWork) {
    for (int64_t index = 0; index < count; index++) run(index, pool->scratch(0));
  } else {
    parallel_for(pool, count, run);
  }
}

// The range `index` of those that a tile reads.
template <class Tile>
void attend_range(const LlmcPagedAttention& a, const Tile& tile, int64_t index, const SoftmaxPart& to) {
  tile.pack_queries();
  tile.attend_range(range_of(a, tile.keys(), index), to);
}

// Adds all ranges that a tile reads to memory.total, which has `done` ranges, and returns how many it has then.
template <class Tile>
int64_t add_ranges(const LlmcPagedAttention& a, const Tile& tile, int64_t done, const TileMemory& memory) {
  tile.pack_queries();
  const Keys keys = tile.keys();
  const int64_t ranges = ranges_of(a, keys);
  for (int64_t i = 0; i < ranges; i++) {
    const bool is_first = done + i == 0;
    tile.attend_range(range_of(a, keys, i), is_first ? memory.total : memory.part);
    if (!is_first) join(memory.total, memory.part, tile.rows());
  }
  return done + ranges;
}

// Attention over all keys in K and V, or over older keys there and the newest in caches of R. Ranges of the newest keys
// come after all others, and a row that sees no key of a range keeps its bits when it is joined.
template <class Q, class K, class V, class R>
void attend_caches(LlmcPool* pool, const LlmcPagedAttention& a, const LlmcPagedAttention* newest) {
  constexpr bool kApart = !std::is_void_v<R>;
  using Tile = TileAttention<Q, K, V>;
  using Newest = TileAttention<Q, std::conditional_t<kApart, R, Q>>;
  using Whole = std::conditional_t<kApart, Newest, Tile>;
  const LlmcPagedAttention& whole = kApart ? *newest : a;
  const Plan plan = make_plan(pool, a, newest);
  int64_t parts = 0;
  for (int64_t r = 0; r < a.requests; r++) parts += plan.parts(r);

  const auto items = [&](int64_t r) { return plan.items(r); };
  for_items(pool, plan, items, [&](const Cursor& cursor, int64_t item, const TileMemory& memory) {
    const int64_t r = cursor.request;
    if (plan.split(r)) {
      const RowTile rows = plan.tile(r, item / plan.ranges(r));
      const SoftmaxPart part = plan.part(pool, cursor.first_part + item);
      const Tile tile(a, rows, memory);
      const int64_t index = item % plan.ranges(r), older = kApart ? ranges_of(a, tile.keys()) : plan.ranges(r);
      if (index < older) return attend_range(a, tile, index, part);
      if constexpr (kApart) attend_range(whole, Newest(whole, rows, memory), index - older, part);
      return;
    }
    const RowTile rows = plan.tile(r, item);
    const int64_t done = add_ranges(a, Tile(a, rows, memory), 0, memory);
    if constexpr (kApart) add_ranges(whole, Newest(whole, rows, memory), done, memory);
    Whole(whole, rows, memory).write(memory.total);
  });
  if (parts == 0) return;

  const auto joins = [&](int64_t r) { return plan.split(r) ? plan.tiles(r) : 0; };
  for_items(pool, plan, joins, [&](const Cursor& cursor, int64_t item, const TileMemory& memory) {
    const int64_t ranges = plan.ranges(cursor.request);
    const Whole tile(whole, plan.tile(cursor.request, item), memory);
    const SoftmaxPart total = plan.part(pool, cursor.first_part + item * ranges);
    for (int64_t i = 1; i < ranges; i++)
      join(total, plan.part(pool, cursor.first_part + item * ranges + i), tile.rows());
    tile.write(total);
  });
}

template <class Q, class K, class V = K>
void attend(LlmcPool* pool, const LlmcPagedAttention& a) {
  attend_caches<Q, K, V, void>(pool, a, nullptr);
}

// With the newest keys apart, in caches of R.
template <class R, class Q, class K, class V = K>
void attend_newest(LlmcPool* pool, const LlmcPagedAttention& a) {
  const LlmcPagedAttention newest = of_newest(a);
  attend_caches<Q, K, V, R>(pool, a, &newest);
}

}  // namespace llmc::attention
