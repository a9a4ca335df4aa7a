// Attention of a tile of query rows over one KV head of one request: flash attention over a paged cache.
//
// A row is one query head at one token; the rows of a tile, all that read the same keys, share one pass over them.
// Keys come in tiles of kAttentionKeys and these in ranges of kAttentionRange, both cut at fixed positions of the
// request: what a row computes does not depend on where a prefill was cut or on which thread takes which range.
// Source: Dao 2023, "FlashAttention-2"; Kwon et al. 2023, "PagedAttention".
#pragma once
#include <algorithm>

#include "softmax.h"

namespace llmc {

constexpr int64_t kAttentionRows = 64;
constexpr int64_t kAttentionRange = 1024;

inline int64_t padded_to_lanes(int64_t channels) { return (channels + kLanes - 1) / kLanes * kLanes; }

struct RowTile {
  int64_t request;
  int64_t kv_head;
  int64_t first_row;  // of the request's tokens × query heads of the KV head
  int64_t rows;       // <= kAttentionRows
};

struct Keys {
  int64_t first, last;  // positions [first, last)
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
        first_position_(a_.context_lens[tile.request] - (a_.query_starts[tile.request + 1] - first_token_)),
        q_stride_(padded_to_lanes(steps_of<Steps>(a_.head_dim))) {}

  int64_t rows() const { return tile_.rows; }

  // The keys that any row of the tile sees.
  Keys keys() const { return {visible(0).first, visible(tile_.rows - 1).last}; }

  void pack_queries() const {
    for (int64_t row = 0; row < tile_.rows; row++) {
      const Q* q = row_of<const Q>(a_.q, token(row)) + head(row) * a_.head_dim;
      pack_query<Steps>(q, a_.head_dim, memory_.q + row * q_stride_);
    }
  }

  // to = the tile's rows over the keys of one range.
  void attend_range(int64_t range, const SoftmaxPart& to) const {
    to.clear(tile_.rows);
    const Keys seen = keys();
    const int64_t first = std::max(seen.first, range * kAttentionRange);
    const int64_t last = std::min(seen.last, (range + 1) * kAttentionRange);
    for (int64_t base = first / kAttentionKeys * kAttentionKeys; base < last; base += kAttentionKeys)
      attend_keys(base, {std::max(first, base), std::min(last, base + kAttentionKeys)}, to);
  }

  void write(const SoftmaxPart& total) const {
    for (int64_t row = 0; row < tile_.rows; row++) {
      const float* sink = a_.sinks == nullptr ? nullptr : a_.sinks + head(row);
      const float factor = softmax_factor(total.maximum[row], total.sum[row], sink);
      const float* values = total.values + row * total.stride;
      Q* y = row_of<Q>(a_.y, token(row)) + head(row) * a_.value_dim;
      for_vectors(a_.value_dim, [&](int64_t c, auto lanes) { store(y + c, load(values + c) * factor, lanes); });
    }
  }

 private:
  using Steps = StepsOf<Q, K>;

  int64_t token_of_request(int64_t row) const { return (tile_.first_row + row) / group_; }
  int64_t token(int64_t row) const { return first_token_ + token_of_request(row); }
  int64_t head(int64_t row) const { return tile_.kv_head * group_ + (tile_.first_row + row) % group_; }

  Keys visible(int64_t row) const {
    const int64_t last = first_position_ + token_of_request(row) + 1;
    return {a_.window == 0 ? 0 : std::max<int64_t>(0, last - a_.window), last};
  }

  // Row of the cache, counted over blocks and heads, that holds a position.
  int64_t cache_row(int64_t position) const {
    const int64_t block = a_.block_tables[tile_.request * a_.max_blocks + position / a_.block_size];
    return (block * a_.kv_heads + tile_.kv_head) * a_.block_size + position % a_.block_size;
  }

  // One tile of keys, from position `base` on, of which only `seen` is read.
  void attend_keys(int64_t base, Keys seen, const SoftmaxPart& to) const {
    pack(base, seen);
    for_row_blocks(tile_.rows, [&](int64_t row, auto rows) {
      constexpr int ROWS = decltype(rows)::value;
      const int64_t first = std::max(visible(row).first, seen.first) - base;
      const int64_t last = std::min(visible(row + ROWS - 1).last, seen.last) - base;
      if (first >= last) return;
      float* scores = memory_.scores + row * kAttentionKeys;
      for (int64_t key = first / kBlockKeys * kBlockKeys; key < last; key += kBlockKeys)
        score_block<Steps, ROWS>(memory_.q + row * q_stride_, q_stride_, memory_.keys + key,
                                 steps_of<Steps>(a_.head_dim), scores + key);
      float decay[ROWS];
      for (int r = 0; r < ROWS; r++)
        decay[r] = add_scores({a_.scale, a_.softcap}, visible(row + r).first - base, visible(row + r).last - base,
                              scores + r * kAttentionKeys, to.maximum[row + r], to.sum[row + r]);
      add_values<ROWS>(scores, first, last, memory_.values, to.stride, decay, to.values + row * to.stride);
    });
  }

  void pack(int64_t base, Keys seen) const {
    const K* keys[kAttentionKeys];
    for (int64_t position = seen.first; position < seen.last; position++) {
      const int64_t row = cache_row(position);
      keys[position - base] = static_cast<const K*>(a_.k_cache) + row * a_.head_dim;
      pack_value(static_cast<const K*>(a_.v_cache) + row * a_.value_dim, a_.value_dim,
                 memory_.values + (position - base) * memory_.total.stride);
    }
    // Keys that no row sees are masked: any that may be read do in their place.
    for (int64_t key = 0; key < seen.first - base; key++) keys[key] = keys[seen.first - base];
    for (int64_t key = seen.last - base; key < kAttentionKeys; key++) keys[key] = keys[seen.first - base];
    pack_keys<Steps>(keys, a_.head_dim, memory_.keys);
  }

  const LlmcPagedAttention& a_;
  const RowTile tile_;
  const TileMemory& memory_;
  const int64_t group_;
  const int64_t first_token_;
  const int64_t first_position_;
  const int64_t q_stride_;
};

}  // namespace llmc
