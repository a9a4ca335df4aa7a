// mul  (#3 fuse_something)
// model.py:12 in forward
static void loop_0_norm(LlmcPool* pool, int64_t rows, const loops::bf16* __restrict p0, const float* __restrict p1,
                        loops::bf16* __restrict p2) {
  parallel_ranges(pool, rows, 256, [=](int64_t begin, int64_t end, void*) LLMC_ONE_COPY {
    for (int64_t row = begin; row < end; row++)
      for (int64_t i0 = 0; i0 < 4; i0++) {
        float v2 = 0.0f;
        #pragma omp simd reduction(+ : v2)
        for (int64_t c = 0; c < 16; c++) {
          const float v0 = loops::load(p0[row * 192 + i0 * 16 + c]);
          const float v1 = v0 * v0;
          v2 += v1;
        }
        v2 /= 16.0f;
        const float v4 = v2 + 1e-05f;
        const float v5 = 1.0f / sqrtf(v4);
        #pragma omp simd
        for (int64_t c = 0; c < 16; c++) {
          const float v0 = loops::load(p0[row * 192 + i0 * 16 + c]);
          const float v6 = v0 * v5;
          const float v7 = loops::load(p1[c]);
          const float v8 = v6 * v7;
          loops::store(p2[row * 64 + i0 * 16 + c], v8);
        }
      }
  });
}
