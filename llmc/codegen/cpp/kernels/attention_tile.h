// Attention of a tile of query rows of one request: flash attention over a paged cache.
//
// A row is one query head at one token. Rows that read the same KV head share one pass over it; a tile of few tokens
// takes in several KV heads, so that what it reads of a block lies together.
// Keys come in tiles of kAttentionKeys and these in ranges of kAttentionRange, both cut at fixed places of the request:
// what a row computes does not depend on where a prefill was cut or on which thread takes which range. From the first
// row on that a tree hides from some token, each token's keys are gathered at the places that they have without it.
// Source: Dao 2023, "FlashAttention-2"; Kwon et al. 2023, "PagedAttention".
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
  int64_t cache_group;  // as in LlmcKvWrite
  const int64_t* tree_masks;  // [tokens], bit d: the row d before a token's own is hidden from it; null: none is
  const float* slopes;  // [heads], what a position farther back takes off a score; null: nothing
  int64_t chunk;        // no key before the multiple of it at or before the query's own place is seen; 0: all are
  int64_t latent;       // channels at the end of a key that are its value's, and in no other cache: value_dim or 0
  LlmcRows k, v;        // where there is no cache: of the step's tokens, [tokens, kv_heads * head_dim or value_dim]; then
                        // each token sees all of its request, or those nearer than the window
  int64_t sink_stride;  // from one token's sinks to the next one's; 0: all have the same
  const float* bias;    // [tokens, heads, extent], added to the score of the key so many places back; null: nothing
  int64_t extent;
  LlmcRows chosen;      // [tokens, chosen_count] int32, in order: places of the keys that a token sees; null: all
  int64_t chosen_count;
} LlmcPagedAttention;

namespace llmc {

constexpr int64_t kAttentionRows = 64;
constexpr int64_t kAttentionRange = 1024;

inline int64_t padded_to_lanes(int64_t channels) { return (channels + kLanes - 1) / kLanes * kLanes; }

// Whether keys and values are those of the step, which no query is before or behind.
inline bool both_ways(const LlmcPagedAttention& a) { return a.k.data != nullptr; }

// Of a request, with those of this step.
inline int64_t cached_rows(const LlmcPagedAttention& a, int64_t request) {
  return both_ways(a) ? a.query_starts[request + 1] - a.query_starts[request] : a.context_lens[request];
}

// The masks of a request's tokens, null if they hide nothing. The last token of a tree never sees all others.
inline const int64_t* tree_of(const LlmcPagedAttention& a, int64_t request) {
  const int64_t begin = a.query_starts[request], end = a.query_starts[request + 1];
  return a.tree_masks == nullptr || begin == end || a.tree_masks[end - 1] == 0 ? nullptr : a.tree_masks + begin;
}

// Of the keys that a query in this place sees.
inline int64_t first_seen(const LlmcPagedAttention& a, int64_t place) {
  const int64_t by_window = a.window == 0 ? 0 : place - a.window + 1;
  const int64_t by_chunk = a.chunk == 0 ? 0 : place - place % a.chunk;
  return std::max({int64_t{0}, by_window, by_chunk});
}

// Behind the last key that a query in this place sees, of `all`.
inline int64_t end_seen(const LlmcPagedAttention& a, int64_t place, int64_t all) {
  if (!both_ways(a)) return place + 1;
  return a.window == 0 ? all : std::min(all, place + a.window);
}

// Places of the keys that any of a request's tokens from `first_row` on may see, the last key being in row `rows` - 1.
inline Keys seen_from(const LlmcPagedAttention& a, const int64_t* tree, int64_t first_row, int64_t rows) {
  return {first_seen(a, std::max<int64_t>(0, first_row - (tree == nullptr ? 0 : VisibleRows::kReach))), rows};
}

struct RowTile {
  int64_t request;
  int64_t kv_head, kv_heads;  // the first, and how many
  int64_t first_row, rows;    // of the request's tokens × query heads of one KV head; kv_heads · rows <= kAttentionRows
};

// One thread's memory for a tile.
struct TileMemory {
  float* q;              // [rows, head_dim padded]
  float* keys;           // [head_dim padded, kAttentionKeys]
  float* values;         // [kAttentionKeys, value_dim padded]
  float* scores;         // [rows, kAttentionKeys]
  SoftmaxPart total;
  SoftmaxPart part;

  static int64_t floats(int64_t head_dim, int64_t value_dim) {
    const int64_t depth = padded_to_lanes(head_dim), stride = padded_to_lanes(value_dim);
    return (kAttentionRows + kAttentionKeys) * depth + kAttentionKeys * (stride + kAttentionRows) +
           2 * SoftmaxPart::floats(kAttentionRows, stride);
  }
  TileMemory(float* memory, int64_t head_dim, int64_t value_dim)
      : q(memory),
        keys(q + kAttentionRows * padded_to_lanes(head_dim)),
        values(keys + kAttentionKeys * padded_to_lanes(head_dim)),
        scores(values + kAttentionKeys * padded_to_lanes(value_dim)),
        total(scores + kAttentionRows * kAttentionKeys, kAttentionRows, padded_to_lanes(value_dim)),
        part(total.sum + kAttentionRows, kAttentionRows, padded_to_lanes(value_dim)) {}
};

template <class Q, class K>
class TileAttention {
 public:
  TileAttention(const LlmcPagedAttention& arguments, const RowTile& tile, const TileMemory& memory)
      : a_(arguments),
        tile_(tile),
        memory_(memory),
        group_(a_.heads / a_.kv_heads),
        first_token_(a_.query_starts[tile.request]),
        all_rows_(cached_rows(a_, tile.request)),
        first_own_row_(all_rows_ - (a_.query_starts[tile.request + 1] - first_token_)),
        tree_(tree_of(a_, tile.request)),
        shared_to_(first_hidden()),
        keys_(a_.head_dim - a_.latent, a_.block_size, a_.cache_group),
        values_(a_.value_dim, a_.block_size, a_.cache_group),
        q_stride_(padded_to_lanes(steps_of<Steps>(a_.head_dim))) {}

  int64_t rows() const { return tile_.kv_heads * tile_.rows; }

  // The keys that any row of the tile may see.
  Keys keys() const {
    const int64_t last = rows_of(token_of_request(tile_.rows - 1)).own;
    return seen_from(a_, tree_, rows_of(token_of_request(0)).own, end_seen(a_, last, all_rows_));
  }

  void pack_queries() const {
    for (int64_t row = 0; row < rows(); row++) {
      const Q* q = row_of<const Q>(a_.q, token(row)) + head(row) * a_.head_dim;
      pack_query<Steps>(q, a_.head_dim, memory_.q + row * q_stride_);
    }
  }

  // to = the tile's rows over the keys of one range.
  void attend_range(int64_t range, const SoftmaxPart& to) const {
    to.clear(rows());
    const Keys seen = keys();
    const Keys in_range{std::max(seen.first, range * kAttentionRange),
                        std::min(seen.last, (range + 1) * kAttentionRange)};
    attend_tiles({in_range.first, std::min(in_range.last, shared_to_)}, {in_range.last - 1, 0}, {0, tile_.rows}, to);
    if (in_range.last <= shared_to_) return;
    for (int64_t token = token_of_request(0); token <= token_of_request(tile_.rows - 1); token++) {
      const VisibleRows rows = rows_of(token);
      const int64_t first_row = std::max<int64_t>(0, token * group_ - tile_.first_row);
      const int64_t last_row = std::min(tile_.rows, (token + 1) * group_ - tile_.first_row);
      const Keys own = visible(first_row);
      attend_tiles({std::max({in_range.first, own.first, shared_to_}), std::min(in_range.last, own.last)}, rows,
                   {first_row, last_row - first_row}, to);
    }
  }

  void write(const SoftmaxPart& total) const {
    for (int64_t row = 0; row < rows(); row++) {
      const float* sink = a_.sinks == nullptr ? nullptr : a_.sinks + token(row) * a_.sink_stride + head(row);
      const float factor = softmax_factor(total.maximum[row], total.sum[row], sink);
      const float* values = total.values + row * total.stride;
      Q* y = row_of<Q>(a_.y, token(row)) + head(row) * a_.value_dim;
      for_vectors(a_.value_dim, [&](int64_t c, auto lanes) { store(y + c, load(values + c) * factor, lanes); });
    }
  }

 private:
  using Steps = StepsOf<Q, K>;

  // Some of a tile's rows of each head.
  struct RowSpan {
    int64_t first, count;
  };

  // The rows of `span` over the keys `seen`, which lie where `rows` says.
  void attend_tiles(Keys seen, const VisibleRows& rows, RowSpan span, const SoftmaxPart& to) const {
    if (seen.first >= seen.last) return;
    CachedKeys tiles[2];
    int64_t base = seen.first / kAttentionKeys * kAttentionKeys;
    find(rows, base, seen, tiles[0]);
    for (int now = 0; base < seen.last; base += kAttentionKeys, now = 1 - now) {
      const bool more = base + kAttentionKeys < seen.last;
      if (more) find(rows, base + kAttentionKeys, seen, tiles[1 - now]);
      for (int64_t head = 0; head < tile_.kv_heads; head++) {
        const bool last_head = head + 1 == tile_.kv_heads;
        const CachedKeys& next = last_head && more ? tiles[1 - now] : tiles[now];
        attend_keys(base, within(seen, base), head, span, tiles[now], next, last_head ? 0 : head + 1, to);
      }
    }
  }

  // Rows of one KV head follow each other.
  int64_t row_of_request(int64_t row) const { return tile_.first_row + row % tile_.rows; }
  int64_t token_of_request(int64_t row) const { return row_of_request(row) / group_; }
  int64_t token(int64_t row) const { return first_token_ + token_of_request(row); }
  int64_t head(int64_t row) const {
    return (tile_.kv_head + row / tile_.rows) * group_ + row_of_request(row) % group_;
  }

  VisibleRows rows_of(int64_t token) const {
    return {first_own_row_ + token, tree_ == nullptr ? 0 : static_cast<uint64_t>(tree_[token])};
  }

  // Of a tile of keys before this place all tokens of the tile see the same rows.
  int64_t first_hidden() const {
    if (tree_ == nullptr) return INT64_MAX;
    int64_t first = INT64_MAX;
    for (int64_t token = token_of_request(0); token <= token_of_request(tile_.rows - 1); token++)
      first = std::min(first, rows_of(token).straight());
    return first / kAttentionKeys * kAttentionKeys;
  }

  Keys visible(int64_t row) const {
    const int64_t place = rows_of(token_of_request(row)).count() - 1;
    return {first_seen(a_, place), end_seen(a_, place, all_rows_)};
  }

  // Bit i: the token sees the key in place base + i, as far as an indexer says.
  uint64_t chosen_from(int64_t token, int64_t base) const {
    if (a_.chosen.data == nullptr) return ~uint64_t{0};
    const int32_t* places = row_of<const int32_t>(a_.chosen, token);
    const int32_t* end = places + a_.chosen_count;
    uint64_t bits = 0;
    for (const int32_t* at = std::lower_bound(places, end, base); at != end && *at < base + kAttentionKeys; at++)
      bits |= uint64_t{1} << (*at - base);
    return bits;
  }

  static Keys within(Keys keys, int64_t base) {
    return {std::max(keys.first, base), std::min(keys.last, base + kAttentionKeys)};
  }

  // Where a tile of keys lies, for the first head.
  struct CachedKeys {
    typename Cache<K>::Row keys[kAttentionKeys];
    typename Cache<K>::Row values[kAttentionKeys];
  };

  // Keys outside of `seen` are masked later: any that may be read does in their place.
  void find(const VisibleRows& rows, int64_t base, Keys seen, CachedKeys& tile) const {
    // Not a structured binding, which compilers before C++20 let no lambda refer to.
    const Keys found = within(seen, base);
    const int64_t first = found.first, last = found.last;
    rows.for_runs(first, last, [&](int64_t row, int64_t place, int64_t count) {
      find_run(row, count, tile.keys + (place - base), tile.values + (place - base));
    });
    const auto fill = [&](int64_t from, int64_t to) {
      std::fill(tile.keys + from, tile.keys + to, tile.keys[first - base]);
      std::fill(tile.values + from, tile.values + to, tile.values[first - base]);
    };
    fill(0, first - base);
    fill(last - base, kAttentionKeys);
  }

  // Where rows from `first` on lie in the cache.
  void find_run(int64_t first, int64_t count, typename Cache<K>::Row* key_rows,
                typename Cache<K>::Row* value_rows) const {
    if (both_ways(a_)) return find_tokens(first, count, key_rows, value_rows);
    const int32_t* blocks = a_.block_tables + tile_.request * a_.max_blocks;
    for (int64_t row = first; row < first + count;) {
      const int64_t in_block = row % a_.block_size;
      const int64_t head = blocks[row / a_.block_size] * a_.kv_heads + tile_.kv_head;
      const int64_t end = std::min(first + count, row - in_block + a_.block_size);
      auto key = keys_.row(static_cast<const uint8_t*>(a_.k_cache) + head * keys_.head_bytes(), in_block);
      auto value = values_.row(static_cast<const uint8_t*>(a_.v_cache) + head * values_.head_bytes(), in_block);
      for (; row < end; row++, key = keys_.next(key), value = values_.next(value)) {
        key_rows[row - first] = key;
        value_rows[row - first] = value;
      }
    }
  }

  // The same of the step's own keys and values.
  void find_tokens(int64_t first, int64_t count, typename Cache<K>::Row* key_rows,
                   typename Cache<K>::Row* value_rows) const {
    if constexpr (!kHoldsCodes<K>) {
      for (int64_t i = 0; i < count; i++) {
        const int64_t token = first_token_ + first + i;
        key_rows[i] = row_of<const K>(a_.k, token) + tile_.kv_head * a_.head_dim;
        value_rows[i] = row_of<const K>(a_.v, token) + tile_.kv_head * a_.value_dim;
      }
    }
  }

  // One tile of keys of one head, from place `base` on, of which some row of `span` sees `seen`.
  void attend_keys(int64_t base, Keys seen, int64_t head, RowSpan span, const CachedKeys& now, const CachedKeys& next,
                   int64_t next_head, const SoftmaxPart& to) const {
    const int64_t key_bytes = keys_.head_bytes(), value_bytes = values_.head_bytes();
    const CachedRows<K> keys{keys_, now.keys, head * key_bytes}, values{values_, now.values, head * value_bytes};
    const FetchNext<K> fetch{{keys_, next.keys, next_head * key_bytes},
                             {values_, next.values, next_head * value_bytes},
                             keys_.row_bytes(),
                             values_.row_bytes()};
    pack_keys<Steps>(keys, keys_.channels, fetch, memory_.keys);
    if (a_.latent != 0)
      pack_keys<Steps>(values, a_.latent, FetchNext<K>{fetch.keys, fetch.values, 0, 0},
                       memory_.keys + steps_of<Steps>(keys_.channels) * kAttentionKeys);
    const CachedValues<Steps, K> cached{values};
    constexpr int64_t kFewRows = 8;
    const RowSpan of_head{head * tile_.rows + span.first, span.count};
    if (span.count <= kFewRows && a_.value_dim % kLanes == 0) {
      add_tile(base, seen, of_head, cached, fetch, to);
    } else {
      pack_values(cached, a_.value_dim, to.stride, memory_.values);
      add_tile(base, seen, of_head, PackedValues{memory_.values, to.stride}, fetch, to);
    }
  }

  // Rows of one head over the packed keys.
  template <class Values>
  void add_tile(int64_t base, Keys seen, RowSpan span, const Values& values, const FetchNext<K>& fetch,
                const SoftmaxPart& to) const {
    for_row_tile(span.count, [&](int64_t row, auto rows) {
      const FetchNext<K> nothing{fetch.keys, fetch.values, 0, 0};
      add_rows<decltype(rows)::value>(base, seen, span.first + row, values, row == 0 ? fetch : nothing, to);
    });
  }

  template <int ROWS, class Values>
  void add_rows(int64_t base, Keys seen, int64_t row, const Values& values, const FetchNext<K>& fetch,
                const SoftmaxPart& to) const {
    Keys seen_by[ROWS], by_any{INT64_MAX, 0};
    float slopes[ROWS];
    const float* bias[ROWS];
    for (int r = 0; r < ROWS; r++) {
      slopes[r] = a_.slopes == nullptr ? 0.0f : a_.slopes[head(row + r)];
      bias[r] = a_.bias == nullptr ? nullptr : a_.bias + (token(row + r) * a_.heads + head(row + r)) * a_.extent;
      const Keys keys = visible(row + r);
      by_any = {std::min(by_any.first, keys.first), std::max(by_any.last, keys.last)};
      seen_by[r] = {keys.first - base, keys.last - base};
    }
    const int64_t first = std::max(by_any.first, seen.first) - base;
    const int64_t last = std::min(by_any.last, seen.last) - base;
    if (first >= last) return;
    uint64_t chosen[ROWS], by_some = 0;
    for (int r = 0; r < ROWS; r++) by_some |= chosen[r] = chosen_from(token(row + r), base);
    if (by_some == 0) return;
    float* scores = memory_.scores + row * kAttentionKeys;
    for (int64_t key = first / kBlockKeys * kBlockKeys; key < last; key += kBlockKeys)
      score_block<Steps, ROWS>(memory_.q + row * q_stride_, q_stride_, memory_.keys + key, steps_of<Steps>(a_.head_dim),
                               fetch, scores + key);
    float decay[ROWS];
    const ScoreScale by{a_.scale, a_.softcap, a_.slopes == nullptr ? nullptr : slopes,
                        a_.bias == nullptr ? nullptr : bias, a_.extent,
                        a_.chosen.data == nullptr ? nullptr : chosen};
    add_scores<Steps>(by, seen_by, fetch, scores, to.maximum + row, to.sum + row, decay);
    add_values<Steps, ROWS>(scores, first, last, values, fetch, decay, to.values + row * to.stride, to.stride);
  }

  const LlmcPagedAttention& a_;
  const RowTile tile_;
  const TileMemory& memory_;
  const int64_t group_;
  const int64_t first_token_;
  const int64_t all_rows_;
  const int64_t first_own_row_;
  const int64_t* const tree_;
  const int64_t shared_to_;
  const Cache<K> keys_, values_;
  const int64_t q_stride_;
};

}  // namespace llmc
