// The memory of one thread for a tile of attention.
#pragma once
#include "coded_products.h"
#include "softmax.h"

namespace llmc {

constexpr int64_t kAttentionRows = 64;  // of queries in a tile

inline int64_t padded_to_lanes(int64_t channels) { return (channels + kLanes - 1) / kLanes * kLanes; }

struct TileMemory {
  float* q;              // [rows, head_dim padded]
  float* keys;           // [head_dim padded, kAttentionKeys]
  float* values;         // [kAttentionKeys, value_dim padded]
  float* scores;         // [rows, kAttentionKeys]
  SoftmaxPart total;
  SoftmaxPart part;
  // For caches of codes, whose groups have at least four channels.
  int64_t key_groups;
  float* q_sums;         // [rows, key_groups]
  float* key_scales;     // [scales and minima, key_groups, kAttentionKeys]
  float* value_scales;   // the same for values
  float* scaled;         // ScaledProbabilities

  static int64_t floats(int64_t head_dim, int64_t value_dim) {
    const int64_t depth = padded_to_lanes(head_dim), stride = padded_to_lanes(value_dim);
    const int64_t of_groups = depth / 4 * (kAttentionRows + 2 * kAttentionKeys) + stride / 4 * 2 * kAttentionKeys;
    return (kAttentionRows + kAttentionKeys) * depth + kAttentionKeys * (stride + kAttentionRows) +
           2 * SoftmaxPart::floats(kAttentionRows, stride) + of_groups + ScaledProbabilities::floats(stride / 4);
  }
  TileMemory(float* memory, int64_t head_dim, int64_t value_dim)
      : q(memory),
        keys(q + kAttentionRows * padded_to_lanes(head_dim)),
        values(keys + kAttentionKeys * padded_to_lanes(head_dim)),
        scores(values + kAttentionKeys * padded_to_lanes(value_dim)),
        total(scores + kAttentionRows * kAttentionKeys, kAttentionRows, padded_to_lanes(value_dim)),
        part(total.sum + kAttentionRows, kAttentionRows, padded_to_lanes(value_dim)),
        key_groups(padded_to_lanes(head_dim) / 4),
        q_sums(part.sum + kAttentionRows),
        key_scales(q_sums + key_groups * kAttentionRows),
        value_scales(key_scales + 2 * key_groups * kAttentionKeys),
        scaled(value_scales + padded_to_lanes(value_dim) / 4 * 2 * kAttentionKeys) {}
};

}  // namespace llmc
