// llmc::rope_angles and llmc::rope.
#include "rope.h"

#include <cmath>

// cos, sin: [tokens, half], contiguous fp32                        (llmc::rope_angles)
typedef struct {
  int64_t tokens, half;
  const int32_t* positions;
  const float* inv_freq;  // [half]
  float scale;
  float* cos;
  float* sin;
} LlmcRopeAngles;

// Head h of token t starts at data[t * stride + h * head_dim]; channels from 2·half on pass unchanged. x may be y.
typedef struct {
  int64_t tokens, heads, head_dim, half;
  int32_t interleaved;
  LlmcRows x;
  const float* cos;
  const float* sin;
  LlmcRows y;
} LlmcRope;

namespace {

template <class T>
void rope(LlmcPool* pool, const LlmcRope& a) {
  llmc::for_rows(pool, a.tokens, a.heads * a.head_dim, [&](int64_t token) {
    const llmc::Rotation rotation{a.cos + token * a.half, a.sin + token * a.half, a.half, a.interleaved != 0};
    const T* x = llmc::row_of<const T>(a.x, token);
    T* y = llmc::row_of<T>(a.y, token);
    for (int64_t c = 0; c < a.heads * a.head_dim; c += a.head_dim) llmc::rotate(rotation, a.head_dim, x + c, y + c);
  });
}

// The angle is rounded to fp32 before its cosine is taken, as torch does: at position 1,000,000 that rounding alone
// moves the angle by up to 0.03, so a more exact angle would differ from the one in the model's training.
void rope_angles(LlmcPool* pool, const LlmcRopeAngles& a) {
  constexpr int64_t kWork = 64;  // of a cosf and a sinf, against an element of a light loop
  llmc::for_rows(pool, a.tokens, kWork * a.half, [&](int64_t token) {
    const float position = static_cast<float>(a.positions[token]);
    for (int64_t i = 0; i < a.half; i++) {
      const float angle = position * a.inv_freq[i];
      a.cos[token * a.half + i] = std::cos(angle) * a.scale;
      a.sin[token * a.half + i] = std::sin(angle) * a.scale;
    }
  });
}

}  // namespace

LLMC_KERNEL(LlmcRopeAngles, rope_angles, rope_angles)
LLMC_KERNELS(LlmcRope, rope, rope)
