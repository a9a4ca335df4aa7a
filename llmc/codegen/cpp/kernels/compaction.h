// A request's rows that are to be chosen, as llmc/ops/compact_kv.py lays them out.
#pragma once
#include <cstdint>
#include <cstring>

namespace llmc {

struct Compaction {
  int64_t rows, kept, queries;
  int64_t tokens;  // that the model has read
  int64_t pinned;  // first rows that are kept whatever their scores
  const int32_t* blocks;  // of the rows
  const int32_t* places;  // blocks of the rows that are kept
  const int32_t* slots;   // of the queries

  Compaction(const int32_t* numbers, int64_t block_size)
      : rows(numbers[0]),
        kept(numbers[1]),
        queries(numbers[2]),
        tokens(numbers[3]),
        pinned(numbers[4]),
        blocks(numbers + 5),
        places(blocks + (rows + block_size - 1) / block_size),
        slots(places + (kept + block_size - 1) / block_size) {}
};

// One head's rows in a cache, as they are stored.
struct StoredRows {
  uint8_t* cache;
  int64_t heads, head, block_size, bytes, scales;

  uint8_t* block(int64_t number) const {
    return cache + (number * heads + head) * block_size * (bytes + 2 * scales);
  }
  void copy(int64_t from_block, int64_t from, int64_t to_block, int64_t to) const {
    const uint8_t* source = block(from_block);
    uint8_t* destination = block(to_block);
    std::memmove(destination + to * bytes, source + from * bytes, static_cast<size_t>(bytes));
    for (int64_t scale = 0; scale < scales; scale++) {
      const int64_t begin = block_size * (bytes + 2 * scale);
      std::memmove(destination + begin + 2 * to, source + begin + 2 * from, 2);
    }
  }
};

}  // namespace llmc
