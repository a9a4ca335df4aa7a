// llmc::rotate_heads: each head's channels times an orthonormal Hadamard matrix, block by block.
#include "hadamard.h"

// Channels [0, first) of a head and those from `first` on have separate blocks, as large as the greatest power of two
// that divides their number. x may be y.
typedef struct {
  int64_t tokens, heads, head_dim, first;
  LlmcRows x;
  LlmcRows y;
} LlmcRotateHeads;

namespace {

template <class T>
void rotate_heads(LlmcPool* pool, const LlmcRotateHeads& a) {
  llmc::for_rows(pool, a.tokens, 2 * a.heads * a.head_dim, [&](int64_t token) {
    const T* x = llmc::row_of<const T>(a.x, token);
    T* y = llmc::row_of<T>(a.y, token);
    for (int64_t c = 0; c < a.heads * a.head_dim; c += a.head_dim) {
      llmc::rotate_blocks(x + c, a.first, y + c);
      llmc::rotate_blocks(x + c + a.first, a.head_dim - a.first, y + c + a.first);
    }
  });
}

}  // namespace

LLMC_KERNELS(LlmcRotateHeads, rotate_heads, rotate_heads)
