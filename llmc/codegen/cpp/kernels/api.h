// The C interface of the hand-written CPU kernels and of a compiled engine.
//
// One argument struct per kernel, so that generated code, the tests (ctypes) and the tuner all call the same way.
// Suffixes name element types: f32, bf16 (activations and weights); a second one names the KV cache's.
// All arithmetic is in fp32, rounded once where a result is stored. No kernel allocates. Sums over `in` run in an
// order that does not depend on the number of tokens, so a request's result does not depend on its neighbours.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)  // what is declared here; all else is compiled with -fvisibility=hidden

// ---- thread pool -----------------------------------------------------------------------------------------------
// `threads` counts the caller. Each thread owns `scratch_bytes` of 64-byte-aligned memory that kernels may use.
typedef struct LlmcPool LlmcPool;
LlmcPool* llmc_pool_create(int32_t threads, int64_t scratch_bytes);
void llmc_pool_destroy(LlmcPool* pool);

// ---- data ------------------------------------------------------------------------------------------------------
// A matrix of rows: element (t, c) is ((T*)data)[t * stride + c]; stride in elements. data may be null where optional.
typedef struct {
  void* data;
  int64_t stride;
} LlmcRows;

// The order is that of ACTIVATIONS in llmc/ops/activation.py.
enum LlmcActivation {
  LLMC_IDENTITY = 0,
  LLMC_SILU = 1,
  LLMC_GELU = 2,
  LLMC_GELU_TANH = 3,
  LLMC_RELU = 4,
  LLMC_RELU2 = 5,
  LLMC_QUICK_GELU = 6,
  LLMC_SIGMOID = 7,
  LLMC_TANH = 8,
};

// Weight panels: output rows in groups of LLMC_PANEL, zero-padded; within a panel, k runs outermost.
//   f32:  panel[k][lane]                  lane in 0..LLMC_PANEL-1
//   bf16: panel[k / 2][lane][k % 2]       in padded to even with zeros
// Gated panels hold LLMC_PANEL / 2 gate rows, then the same rows of up, so one panel makes LLMC_PANEL / 2 outputs.
enum { LLMC_PANEL = 32 };

// ---- matrix products -------------------------------------------------------------------------------------------
// y = activation(x · weightᵀ + bias) · scale + residual          (llmc::linear, llmc::fused_linear)
typedef struct {
  int64_t tokens, in, out;
  LlmcRows x;           // [tokens, in]
  const void* weight;   // panels of [out, in]
  const float* bias;    // [out] or null
  LlmcRows residual;    // [tokens, out] or null data
  LlmcRows y;           // [tokens, out]
  int32_t activation;
  float scale;
} LlmcLinear;
void llmc_linear_f32(LlmcPool* pool, const LlmcLinear* arguments);
void llmc_linear_bf16(LlmcPool* pool, const LlmcLinear* arguments);

// y = activation(x · gateᵀ + bias[:out]) · (x · upᵀ + bias[out:]); weight: gated panels of [2·out, in]; scale and
// residual are not used                                            (llmc::gated_linear)
void llmc_gated_linear_f32(LlmcPool* pool, const LlmcLinear* arguments);
void llmc_gated_linear_bf16(LlmcPool* pool, const LlmcLinear* arguments);

// y (always fp32) = x · weightᵀ + bias                             (llmc::lm_head)
void llmc_lm_head_f32(LlmcPool* pool, const LlmcLinear* arguments);
void llmc_lm_head_bf16(LlmcPool* pool, const LlmcLinear* arguments);

// ---- quantized weights -----------------------------------------------------------------------------------------
// What codes stand for: llmc/ops/weight_codes.py.
enum LlmcCodes { LLMC_INT8 = 0, LLMC_INT4 = 1, LLMC_FP8 = 2, LLMC_NF4 = 3, LLMC_MXFP4 = 4, LLMC_INT5 = 5, LLMC_INT6 = 6 };
// What x is rounded to first: llmc/ops/token_codes.py.
enum LlmcXCodes { LLMC_X_NONE = 0, LLMC_X_INT8 = 1, LLMC_X_FP8 = 2 };
enum LlmcScales { LLMC_SCALES_F32 = 0, LLMC_SCALES_F16 = 1, LLMC_SCALES_BF16 = 2 };

// Code panels: output rows in groups of LLMC_PANEL (gated ones as above), k in groups that share a scale; the bytes of
// one group of one panel are
//   scale[lane]; zero[lane] as int16, if the weight has zeros; code words[k / codes a word][lane]
// 8 bits: a byte for each of four k. 4 bits: for each of eight k; byte i holds the i-th low, the (i + 4)-th high.
// 5 and 6 bits: of each 32 k four words of the low 4 bits, as those of 4 bits, then one or two words of what is above:
// in byte i the bits of k = i, i + 4, … from the lowest on; the last 32 k of a group are filled up.
// Integers, and their zeros, are shifted to be unsigned: by half of their range. What stands for no row has scale 0. A
// group is a multiple of 16, or all of in; then the last word is filled up.

// The products of LlmcLinear with weight[o, k] = (code - zero) · scale (llmc::quantized_linear, quantized_gated_linear,
// quantized_lm_head).
typedef struct {
  int64_t tokens, in, out, group;
  LlmcRows x;
  const void* weight;    // code panels
  const float* x_scale;  // [1], static; or null: a scale for each token
  const float* bias;
  LlmcRows residual;
  LlmcRows y;
  int32_t activation;
  float scale;
  int32_t format;      // LlmcCodes
  int32_t x_format;    // LlmcXCodes
  int32_t scale_type;  // LlmcScales
  int32_t has_zeros;
} LlmcQuantizedLinear;
void llmc_quantized_linear_f32(LlmcPool* pool, const LlmcQuantizedLinear* arguments);
void llmc_quantized_linear_bf16(LlmcPool* pool, const LlmcQuantizedLinear* arguments);
void llmc_quantized_gated_linear_f32(LlmcPool* pool, const LlmcQuantizedLinear* arguments);
void llmc_quantized_gated_linear_bf16(LlmcPool* pool, const LlmcQuantizedLinear* arguments);
void llmc_quantized_lm_head_f32(LlmcPool* pool, const LlmcQuantizedLinear* arguments);
void llmc_quantized_lm_head_bf16(LlmcPool* pool, const LlmcQuantizedLinear* arguments);

// y[t] = weight[ids[t]]                                            (llmc::quantized_embedding)
typedef struct {
  int64_t tokens, channels, group;
  const int32_t* ids;
  const void* weight;  // code panels
  LlmcRows y;
  int32_t format, scale_type, has_zeros;
} LlmcQuantizedEmbedding;
void llmc_quantized_embedding_f32(LlmcPool* pool, const LlmcQuantizedEmbedding* arguments);
void llmc_quantized_embedding_bf16(LlmcPool* pool, const LlmcQuantizedEmbedding* arguments);

// ---- weights that a function yields row by row -------------------------------------------------------------------
// For storages without products of their own: what a weight is stored as, in rows of `stride` elements, and a function
// that writes elements k to k + count of a row of the weight. parts: in the order of the storage's row in storages.py.
typedef struct {
  const void* data;
  int64_t stride;
} LlmcStoredRows;
typedef void (*LlmcReadRow)(const LlmcStoredRows* parts, int64_t row, int64_t k, int64_t count, float* to);

// The products of LlmcLinear with such a weight [out, in]; gated: [2·out, in], gate's rows followed by up's.
typedef struct {
  int64_t tokens, in, out;
  LlmcRows x;
  LlmcReadRow read;
  LlmcStoredRows part0, part1, part2, part3;
  const float* bias;
  LlmcRows residual;
  LlmcRows y;
  int32_t activation;
  float scale;
} LlmcRowLinear;
void llmc_row_linear_f32(LlmcPool* pool, const LlmcRowLinear* arguments);
void llmc_row_linear_bf16(LlmcPool* pool, const LlmcRowLinear* arguments);
void llmc_row_gated_linear_f32(LlmcPool* pool, const LlmcRowLinear* arguments);
void llmc_row_gated_linear_bf16(LlmcPool* pool, const LlmcRowLinear* arguments);
void llmc_row_lm_head_f32(LlmcPool* pool, const LlmcRowLinear* arguments);
void llmc_row_lm_head_bf16(LlmcPool* pool, const LlmcRowLinear* arguments);

// y[t] = row ids[t] of such a table
typedef struct {
  int64_t tokens, channels;
  const int32_t* ids;
  LlmcReadRow read;
  LlmcStoredRows part0, part1, part2, part3;
  LlmcRows y;
} LlmcRowEmbedding;
void llmc_row_embedding_f32(LlmcPool* pool, const LlmcRowEmbedding* arguments);
void llmc_row_embedding_bf16(LlmcPool* pool, const LlmcRowEmbedding* arguments);

// ---- rows ------------------------------------------------------------------------------------------------------
// y[t] = weight[ids[t]]; the weight row-major, or in the panels of a tied lm_head.   (llmc::embedding)
typedef struct {
  int64_t tokens, channels;
  const int32_t* ids;
  const void* weight;
  LlmcRows y;
} LlmcEmbedding;
void llmc_embedding_f32(LlmcPool* pool, const LlmcEmbedding* arguments);
void llmc_embedding_bf16(LlmcPool* pool, const LlmcEmbedding* arguments);
void llmc_embedding_panels_f32(LlmcPool* pool, const LlmcEmbedding* arguments);
void llmc_embedding_panels_bf16(LlmcPool* pool, const LlmcEmbedding* arguments);

// y[i] = x[rows[i]]                                                (llmc::select_rows)
typedef struct {
  int64_t selected, channels;
  const int32_t* rows;
  LlmcRows x, y;
} LlmcSelectRows;
void llmc_select_rows_f32(LlmcPool* pool, const LlmcSelectRows* arguments);
void llmc_select_rows_bf16(LlmcPool* pool, const LlmcSelectRows* arguments);

// y[t][c] = x[t][order[c]]                                          (llmc::select_channels)
typedef struct {
  int64_t tokens, channels;
  const int32_t* order;
  LlmcRows x, y;
} LlmcSelectChannels;
void llmc_select_channels_f32(LlmcPool* pool, const LlmcSelectChannels* arguments);
void llmc_select_channels_bf16(LlmcPool* pool, const LlmcSelectChannels* arguments);

// Norm of each group of `channels`: group g of token t starts at x.data[t * stride + g * channels] (groups > 1: per
// head). With residual: s = x + residual rounded to the element type, sum = s, y = norm(s); groups is then 1.
// weight and bias fp32 or null. (llmc::rms_norm, layer_norm, add_rms_norm, add_layer_norm)
typedef struct {
  int64_t tokens, groups, channels;
  LlmcRows x;
  LlmcRows residual;  // null data: none
  const float* weight;
  const float* bias;  // layer_norm only
  float eps;
  LlmcRows y;
  LlmcRows sum;  // with residual only
} LlmcNorm;
void llmc_rms_norm_f32(LlmcPool* pool, const LlmcNorm* arguments);
void llmc_rms_norm_bf16(LlmcPool* pool, const LlmcNorm* arguments);
void llmc_layer_norm_f32(LlmcPool* pool, const LlmcNorm* arguments);
void llmc_layer_norm_bf16(LlmcPool* pool, const LlmcNorm* arguments);

// y = activation(gate) · up                                        (llmc::gated_activation)
typedef struct {
  int64_t tokens, channels;
  LlmcRows gate, up, y;
  int32_t activation;
} LlmcGatedActivation;
void llmc_gated_activation_f32(LlmcPool* pool, const LlmcGatedActivation* arguments);
void llmc_gated_activation_bf16(LlmcPool* pool, const LlmcGatedActivation* arguments);

// tokens[i]: of row i by its numbers, as llmc/runtime/sampling/row_choice.py says; scores[i]: the row's largest logit, NaN
// where there is one; tokens[i] means something only if it is finite, and otherwise names the first that is at fault. A
// thread needs llmc_choose_rows_scratch bytes.
typedef struct {
  int64_t rows, vocabulary;
  const float* logits;       // [rows, vocabulary]
  const float* temperature;  // [rows], as the following; 0: the likeliest
  const int32_t* top_k;      // as large as the vocabulary: none
  const float* top_p;        // 1: none
  const float* min_p;        // 0: none
  const int32_t* seeds;
  const int32_t* counters;
  int32_t* tokens;
  float* scores;
} LlmcChooseRows;
void llmc_choose_rows(LlmcPool* pool, const LlmcChooseRows* arguments);
int64_t llmc_choose_rows_scratch(int64_t vocabulary);

// ---- rotary position embedding ---------------------------------------------------------------------------------
// cos, sin: [tokens, half], contiguous fp32                        (llmc::rope_angles)
typedef struct {
  int64_t tokens, half;
  const int32_t* positions;
  const float* inv_freq;  // [half]
  float scale;
  float* cos;
  float* sin;
} LlmcRopeAngles;
void llmc_rope_angles(LlmcPool* pool, const LlmcRopeAngles* arguments);

// Head h of token t starts at data[t * stride + h * head_dim]; channels from 2·half on pass unchanged. x may be y.
typedef struct {
  int64_t tokens, heads, head_dim, half;
  int32_t interleaved;
  LlmcRows x;
  const float* cos;
  const float* sin;
  LlmcRows y;
} LlmcRope;
void llmc_rope_f32(LlmcPool* pool, const LlmcRope* arguments);
void llmc_rope_bf16(LlmcPool* pool, const LlmcRope* arguments);

// ---- KV cache and attention ------------------------------------------------------------------------------------
// Caches are [blocks, kv_heads, block_size, dim], contiguous; slot s is position s % block_size of block
// s / block_size. With cos == null nothing is rotated and q, q_out are not used (llmc::kv_write); otherwise
// llmc::rope_kv_write, where q_out may be q.
typedef struct {
  int64_t tokens, heads, kv_heads, head_dim, value_dim, half, block_size;
  int32_t interleaved;
  LlmcRows q, k, v;
  const float* cos;
  const float* sin;
  void* k_cache;
  void* v_cache;
  const int32_t* slot_mapping;  // [tokens]
  LlmcRows q_out;
  int64_t cache_group;  // of codes: channels that share a scale; 0: all of a head's
} LlmcKvWrite;
void llmc_kv_write_f32_f32(LlmcPool* pool, const LlmcKvWrite* arguments);
void llmc_kv_write_f32_bf16(LlmcPool* pool, const LlmcKvWrite* arguments);
void llmc_kv_write_bf16_f32(LlmcPool* pool, const LlmcKvWrite* arguments);
void llmc_kv_write_bf16_bf16(LlmcPool* pool, const LlmcKvWrite* arguments);
// Caches of codes are bytes as llmc/ops/cache_codes.py lays them out; a head has LLMC_CODED_HEAD channels at most.
enum { LLMC_CODED_HEAD = 1024 };
void llmc_kv_write_f32_int8(LlmcPool* pool, const LlmcKvWrite* arguments);
void llmc_kv_write_f32_int4(LlmcPool* pool, const LlmcKvWrite* arguments);
void llmc_kv_write_f32_fp8(LlmcPool* pool, const LlmcKvWrite* arguments);
void llmc_kv_write_bf16_int8(LlmcPool* pool, const LlmcKvWrite* arguments);
void llmc_kv_write_bf16_int4(LlmcPool* pool, const LlmcKvWrite* arguments);
void llmc_kv_write_bf16_fp8(LlmcPool* pool, const LlmcKvWrite* arguments);

// llmc::paged_attention; prefill chunks and decodes mixed. The bits of a request's rows depend neither on its neighbours
// nor on where its prefill is cut nor on the number of threads. With bf16 activations and caches, on processors that
// multiply bf16, probabilities too are rounded to bf16 before they multiply values.
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
  const float* sinks;  // [heads] or null
  LlmcRows y;          // [tokens, heads * value_dim]
  int64_t cache_group;  // as in LlmcKvWrite
} LlmcPagedAttention;
void llmc_paged_attention_f32_f32(LlmcPool* pool, const LlmcPagedAttention* arguments);
void llmc_paged_attention_f32_bf16(LlmcPool* pool, const LlmcPagedAttention* arguments);
void llmc_paged_attention_bf16_f32(LlmcPool* pool, const LlmcPagedAttention* arguments);
void llmc_paged_attention_bf16_bf16(LlmcPool* pool, const LlmcPagedAttention* arguments);
void llmc_paged_attention_f32_int8(LlmcPool* pool, const LlmcPagedAttention* arguments);
void llmc_paged_attention_f32_int4(LlmcPool* pool, const LlmcPagedAttention* arguments);
void llmc_paged_attention_f32_fp8(LlmcPool* pool, const LlmcPagedAttention* arguments);
void llmc_paged_attention_bf16_int8(LlmcPool* pool, const LlmcPagedAttention* arguments);
void llmc_paged_attention_bf16_int4(LlmcPool* pool, const LlmcPagedAttention* arguments);
void llmc_paged_attention_bf16_fp8(LlmcPool* pool, const LlmcPagedAttention* arguments);

// Scratch bytes that one thread needs for attention of these shapes: what the pool must be created with.
int64_t llmc_paged_attention_scratch(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t value_dim);
// Scratch bytes that one thread needs for the matrix products up to this `in` and tokens a step.
int64_t llmc_linear_scratch(int64_t max_tokens, int64_t max_in);

// ---- measuring -------------------------------------------------------------------------------------------------
// Reads all of data (bytes: a multiple of 128 KiB) with every thread and returns the bitwise or of its 32-bit words:
// a loop that does nothing else, for the machine's read bandwidth.
uint64_t llmc_read_all(LlmcPool* pool, const void* data, int64_t bytes);
// The matrix products' inner loop on operands in cache, `repeats` times some microseconds of it, shared by the
// threads; returns the operations done: floating-point ones, or those of int8 weights and activations.
int64_t llmc_multiply_in_cache_f32(LlmcPool* pool, int64_t repeats);
int64_t llmc_multiply_in_cache_bf16(LlmcPool* pool, int64_t repeats);
// `repeats` parallel loops of a few empty chunks.
void llmc_empty_regions(LlmcPool* pool, int64_t repeats);
int64_t llmc_multiply_in_cache_int8(LlmcPool* pool, int64_t repeats);

// ---- a compiled engine -----------------------------------------------------------------------------------------
enum { LLMC_ENGINE_ABI = 3 };

// One step: T tokens of R requests, of which L rows want logits.
typedef struct {
  int32_t tokens, requests, logit_rows, max_blocks;
  const int32_t* input_ids;      // [T]
  const int32_t* positions;      // [T]
  const int32_t* slot_mapping;   // [T]
  const int32_t* query_starts;   // [R + 1]
  const int32_t* context_lens;   // [R]
  const int32_t* block_tables;   // [R, max_blocks]
  const int32_t* logit_row_ids;  // [L]
  float* logits;                 // [L, vocab_size]
  int64_t sides;                 // bit i: program.json's side output i is wanted; it stays in the arena
} LlmcStep;

// Pointers stay valid until close. weights: in the order of program.json; caches: k0, v0, k1, v1, …; arena: 64-byte
// aligned, of the size that program.json gives for the engine's limits.
typedef struct {
  const void* const* weights;
  void* const* caches;
  void* arena;
  int32_t threads;
} LlmcBindings;

typedef struct LlmcEngine LlmcEngine;
int32_t llmc_engine_abi(void);
// What the engine takes for granted of the memory in its bindings and steps, as llmc/program/program_interface.py says it.
const char* llmc_engine_interface(void);
LlmcEngine* llmc_engine_open(const LlmcBindings* bindings);
void llmc_engine_step(LlmcEngine* engine, const LlmcStep* step);
// Chooses tokens with the engine's threads, of logits that a step has given.
void llmc_engine_choose(LlmcEngine* engine, const LlmcChooseRows* rows);
// From now on every step writes to times[0] when its first launch begins and to times[i + 1] when launch i has ended,
// in nanoseconds of the monotonic clock; null ends that.
void llmc_engine_time_launches(LlmcEngine* engine, int64_t* times);
void llmc_engine_close(LlmcEngine* engine);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
