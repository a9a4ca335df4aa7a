// A request's rows that are to be chosen, as llmc/ops/compact_kv.py lays them out.
#pragma once
#include <cstdint>

namespace llmc {

struct Compaction {
  int64_t rows, kept, queries;
  const int32_t* blocks;  // of the rows
  const int32_t* places;  // blocks of the rows that are kept
  const int32_t* slots;   // of the queries

  Compaction(const int32_t* numbers, int64_t block_size)
      : rows(numbers[0]),
        kept(numbers[1]),
        queries(numbers[2]),
        blocks(numbers + 3),
        places(blocks + (rows + block_size - 1) / block_size),
        slots(places + (kept + block_size - 1) / block_size) {}
};

}  // namespace llmc
