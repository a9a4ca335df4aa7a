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

#include "seen_keys.h"
#include "tile_memory.h"

namespace llmc {

struct RowTile {
  int64_t request;
  int64_t kv_head, kv_heads;  // the first, and how many
  int64_t first_row, rows;    // of the request's tokens × query heads of one KV head; kv_heads · rows <= kAttentionRows
};

template <class Q, class K, class V = K>  // K, V: what caches of keys and of values hold, numbers or codes both
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
        values_(a_.value_dim, a_.block_size, a_.value_group),
        q_stride_(padded_to_lanes(steps_of<Steps>(a_.head_dim))) {
    // Computed once, because every tile of keys reads it and it needs a division.
    for (int64_t row = 0; row < rows(); row++) visible_[row] = visible(row);
  }

  int64_t rows() const { return tile_.kv_heads * tile_.rows; }

  // The keys that any row of the tile may see, except pinned keys.
  Keys keys() const {
    const int64_t last = rows_of(token_of_request(tile_.rows - 1)).own;
    return seen_from(a_, tree_, rows_of(token_of_request(0)).own, end_seen(a_, last, all_rows_));
  }

  void pack_queries() const {
    for (int64_t row = 0; row < rows(); row++) {
      const Q* q = row_of<const Q>(a_.q, token(row)) + head(row) * a_.head_dim;
      float* to = memory_.q + row * q_stride_;
      if constexpr (kHoldsCodes<K>) {
        float* sums = memory_.q_sums + row * memory_.key_groups;
        pack_query<Steps>(keys_, q, to, sums);
        if (a_.latent != 0)
          pack_query<Steps>(values_, q + keys_.channels, to + steps_of<Steps>(keys_.channels),
                            sums + scaled_groups(keys_));
      } else {
        pack_query<Steps>(q, a_.head_dim, to);
      }
    }
  }

  // to = the tile's rows over the keys of one range.
  void attend_range(int64_t range, const SoftmaxPart& to) const {
    to.clear(rows());
    const Keys seen = keys();
    const int64_t begin = range * kAttentionRange, end = std::min(seen.last, begin + kAttentionRange);
    const int64_t pinned_end = std::min(a_.pinned, end);
    int64_t first = std::max(seen.first, begin);
    if (begin < pinned_end) {
      // A tile with keys of both is read once.
      if (first / kAttentionKeys * kAttentionKeys < pinned_end)
        first = begin;
      else
        attend_run({begin, pinned_end}, to);
    }
    attend_run({first, end}, to);
    if (a_.recent != 0) order_channels(to);
  }

  void write(const SoftmaxPart& total) const {
    for (int64_t row = 0; row < rows(); row++) {
      const float* sink = a_.sinks == nullptr ? nullptr : a_.sinks + token(row) * a_.sink_stride + head(row);
      const float factor = softmax_factor(total.maximum[row], total.sum[row], sink);
      const float* values = total.values + row * total.stride;
      Q* y = row_of<Q>(a_.y, token(row)) + head(row) * a_.value_dim;
      for_vectors(a_.value_dim, [&](int64_t c, auto lanes) {
        store(y + channel_of(c), load(values + c) * factor, lanes);
      });
    }
  }

 private:
  using Steps = StepsOf<Q, K>;
  using Fetch = FetchNext<K, V>;
  // Whether values are multiplied as codes. The order of their channels in sums is then that of a row's bytes.
  bool codes_of_values() const {
    if constexpr (kHoldsCodes<K>) return values_.has_vectors();
    return false;
  }
  int64_t channel_of(int64_t place) const {
    if constexpr (kHoldsCodes<K>)
      if (values_.has_vectors()) return values_.channel_of(place);
    return place;
  }

  // Puts the channels of sums in their own order, in which those over the newest keys are.
  void order_channels(const SoftmaxPart& to) const {
    if (!codes_of_values()) return;
    float* copy = memory_.values;
    for (int64_t row = 0; row < rows(); row++) {
      float* sums = to.values + row * to.stride;
      std::copy_n(sums, to.stride, copy);
      for_vectors(a_.value_dim, [&](int64_t c, auto lanes) { store(sums + channel_of(c), load(copy + c), lanes); });
    }
  }

  // Groups of a cache whose scales are left for sums.
  template <class C> static int64_t scaled_groups(const C& cache) { return cache.has_quads() ? cache.groups : 0; }

  // Some of a tile's rows of each head.
  struct RowSpan {
    int64_t first, count;
  };

  // The tile's rows over keys of one range.
  void attend_run(Keys run, const SoftmaxPart& to) const {
    attend_tiles({run.first, std::min(run.last, shared_to_)}, {run.last - 1, 0}, {0, tile_.rows}, to);
    if (run.last <= shared_to_) return;
    for (int64_t token = token_of_request(0); token <= token_of_request(tile_.rows - 1); token++) {
      const VisibleRows rows = rows_of(token);
      const int64_t first_row = std::max<int64_t>(0, token * group_ - tile_.first_row);
      const int64_t last_row = std::min(tile_.rows, (token + 1) * group_ - tile_.first_row);
      const Keys own = visible(first_row);
      const int64_t first = run.first < a_.pinned ? run.first : std::max(run.first, own.first);
      attend_tiles({std::max(first, shared_to_), std::min(run.last, own.last)}, rows, {first_row, last_row - first_row},
                   to);
    }
  }

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

  // All tokens of the tile see the same rows of every tile of keys before this place.
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

  // Bit i: a query that sees keys from place `first` on, and those that are pinned, sees the key in place base + i.
  uint64_t seen_bits(int64_t first, int64_t base) const {
    const auto from = [](int64_t bit) { return bit <= 0 ? ~uint64_t{0} : bit >= kAttentionKeys ? 0 : ~uint64_t{0} << bit; };
    return from(first - base) | ~from(a_.pinned - base);
  }

  static Keys within(Keys keys, int64_t base) {
    return {std::max(keys.first, base), std::min(keys.last, base + kAttentionKeys)};
  }

  // Where a tile of keys lies, for the first head.
  struct CachedKeys {
    typename Cache<K>::Row keys[kAttentionKeys];
    typename Cache<V>::Row values[kAttentionKeys];
    bool in_order[kAttentionKeys / kLanes];  // CachedRows
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
      if (from >= to) return;
      std::fill(tile.keys + from, tile.keys + to, tile.keys[first - base]);
      std::fill(tile.values + from, tile.values + to, tile.values[first - base]);
    };
    fill(0, first - base);
    fill(last - base, kAttentionKeys);
    // Blocks between pinned keys and a window may have been freed.
    if (base < a_.pinned) fill(a_.pinned - base, std::min(keys().first, last) - base);
    if constexpr (kHoldsCodes<K>)
      for (int64_t key = 0; key < kAttentionKeys; key += kLanes) {
        bool& in_order = tile.in_order[key / kLanes] = true;
        for (int64_t i = 1; i < kLanes; i++) in_order &= tile.keys[key + i].scales == tile.keys[key].scales + 2 * i;
      }
  }

  // Where rows from `first` on lie in the cache.
  void find_run(int64_t first, int64_t count, typename Cache<K>::Row* key_rows,
                typename Cache<V>::Row* value_rows) const {
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
                   typename Cache<V>::Row* value_rows) const {
    if constexpr (!kHoldsCodes<K>) {
      for (int64_t i = 0; i < count; i++) {
        const int64_t token = first_token_ + first + i;
        key_rows[i] = row_of<const K>(a_.k, token) + tile_.kv_head * a_.head_dim;
        value_rows[i] = row_of<const V>(a_.v, token) + tile_.kv_head * a_.value_dim;
      }
    }
  }

  // Attends one tile of keys of one head that starts at place `base`. seen: the keys that some row of `span` sees.
  void attend_keys(int64_t base, Keys seen, int64_t head, RowSpan span, const CachedKeys& now, const CachedKeys& next,
                   int64_t next_head, const SoftmaxPart& to) const {
    const int64_t key_bytes = keys_.head_bytes(), value_bytes = values_.head_bytes();
    const CachedRows<K> keys{keys_, now.keys, head * key_bytes, now.in_order};
    const CachedRows<V> values{values_, now.values, head * value_bytes, now.in_order};
    const Fetch fetch{{keys_, next.keys, next_head * key_bytes, next.in_order},
                      {values_, next.values, next_head * value_bytes, next.in_order},
                      keys_.row_bytes(), values_.row_bytes()};
    pack(keys, fetch, memory_.keys, memory_.key_scales);
    if (a_.latent != 0)
      pack(values, Fetch{fetch.keys, fetch.values, 0, 0},
           memory_.keys + steps_of<Steps>(keys_.channels) * kAttentionKeys, latent_scales());
    constexpr int64_t kFewRows = 8;
    const RowSpan of_head{head * tile_.rows + span.first, span.count};
    if constexpr (kHoldsCodes<K>) {
      if (codes_of_values()) {
        const CodesOfValues<Steps, V> codes{values};
        gather_scales(values, 1.0f, memory_.value_scales);
        if (span.count <= kFewRows) return add_tile(base, seen, of_head, codes, fetch, to);
        pack_codes_of_values(codes, a_.value_dim, memory_.values);
        return add_tile(base, seen, of_head, PackedValues{memory_.values, to.stride}, fetch, to);
      }
    }
    const CachedValues<Steps, V> cached{values};
    if constexpr (!kHoldsCodes<K>)
      if (span.count <= kFewRows && a_.value_dim % kLanes == 0) return add_tile(base, seen, of_head, cached, fetch, to);
    pack_values(cached, a_.value_dim, to.stride, memory_.values);
    add_tile(base, seen, of_head, PackedValues{memory_.values, to.stride}, fetch, to);
  }

  // Keys as steps: codes as they are where their scales can be left for sums.
  template <class C> void pack(const CachedRows<C>& keys, const Fetch& fetch, float* packed, float* scales) const {
    if constexpr (kHoldsCodes<C>)
      if (keys.cache.has_quads()) return pack_codes<Steps>(keys, fetch, packed, scales);
    pack_keys<Steps>(keys, keys.cache.channels, fetch, packed);
  }

  // Where the scales of a latent begin, which is a part of keys.
  float* latent_scales() const {
    if constexpr (kHoldsCodes<K>)
      return memory_.key_scales + scaled_groups(keys_) * Cache<K>::kNumbers * kAttentionKeys;
    return nullptr;
  }

  // Rows of one head over the packed keys.
  template <class Values>
  void add_tile(int64_t base, Keys seen, RowSpan span, const Values& values, const Fetch& fetch,
                const SoftmaxPart& to) const {
    for_row_tile(span.count, [&](int64_t row, auto rows) {
      const Fetch nothing{fetch.keys, fetch.values, 0, 0};
      add_rows<decltype(rows)::value>(base, seen, span.first + row, values, row == 0 ? fetch : nothing, to);
    });
  }

  template <int ROWS, class Values>
  void add_rows(int64_t base, Keys seen, int64_t row, const Values& values, const Fetch& fetch,
                const SoftmaxPart& to) const {
    const bool has_pinned = base < a_.pinned;
    Keys seen_by[ROWS], by_any{INT64_MAX, 0};
    float slopes[ROWS];
    const float* bias[ROWS];
    uint64_t chosen[ROWS], by_some = 0;
    for (int r = 0; r < ROWS; r++) {
      slopes[r] = a_.slopes == nullptr ? 0.0f : a_.slopes[head(row + r)];
      bias[r] = a_.bias == nullptr ? nullptr : a_.bias + (token(row + r) * a_.heads + head(row + r)) * a_.extent;
      Keys keys = visible_[row + r];
      chosen[r] = has_pinned ? seen_bits(keys.first, base) : ~uint64_t{0};
      if (has_pinned) keys.first = base;
      by_any = {std::min(by_any.first, keys.first), std::max(by_any.last, keys.last)};
      seen_by[r] = {keys.first - base, keys.last - base};
    }
    const int64_t first = std::max(by_any.first, seen.first) - base;
    const int64_t last = std::min(by_any.last, seen.last) - base;
    if (first >= last) return;
    for (int r = 0; r < ROWS; r++) by_some |= chosen[r] &= chosen_from(token(row + r), base);
    if (by_some == 0) return;
    float* scores = memory_.scores + row * kAttentionKeys;
    const float* q = memory_.q + row * q_stride_;
    for (int64_t key = first / kBlockKeys * kBlockKeys; key < last; key += kBlockKeys) {
      if constexpr (kHoldsCodes<K>) {
        const StepRuns parts[2] = {step_runs<Steps>(keys_, memory_.key_scales), latent_runs()};
        score_codes<Steps, ROWS>(q, q_stride_, memory_.q_sums + row * memory_.key_groups, memory_.key_groups,
                                 memory_.keys, parts, key, fetch, scores);
      } else {
        score_block<Steps, ROWS>(q, q_stride_, memory_.keys + key, steps_of<Steps>(a_.head_dim), fetch, scores + key);
      }
    }
    float decay[ROWS];
    const ScoreScale by{a_.scale, a_.softcap, a_.slopes == nullptr ? nullptr : slopes,
                        a_.bias == nullptr ? nullptr : bias, a_.extent,
                        a_.chosen.data == nullptr && !has_pinned ? nullptr : chosen, static_cast<int>(a_.recent)};
    float* sums = to.values + row * to.stride;
    if constexpr (kHoldsCodes<K>) {
      if (codes_of_values()) {
        const ScaledProbabilities scaled(memory_.scaled, values_.groups);
        add_scores<FloatSteps>(by, seen_by, fetch, scores, to.maximum + row, to.sum + row, decay);
        scale_probabilities<Steps, ROWS>(values_, memory_.value_scales, scores, scaled);
        return add_coded_values<Steps, ROWS>(values_, scaled, first, last, values, fetch, decay, sums, to.stride);
      }
    }
    if constexpr (!std::is_same_v<Values, CodesOfValues<Steps, V>>) {
      add_scores<Steps>(by, seen_by, fetch, scores, to.maximum + row, to.sum + row, decay);
      add_values<Steps, ROWS>(scores, first, last, values, fetch, decay, sums, to.stride);
    }
  }

  StepRuns latent_runs() const {
    return a_.latent == 0 ? StepRuns{0, 0, nullptr, nullptr} : step_runs<Steps>(values_, latent_scales());
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
  const Cache<K> keys_;
  const Cache<V> values_;
  const int64_t q_stride_;
  Keys visible_[kAttentionRows];
};

}  // namespace llmc
