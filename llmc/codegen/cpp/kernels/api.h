// The C interface of a compiled engine, and what those of the hand-written CPU kernels have in common.
//
// Each kernel takes one struct, which its own file declares (kernel.h), so that generated code, the tests (ctypes) and
// the tuner all call the same way.
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

// ---- quantized weights -----------------------------------------------------------------------------------------
// What codes stand for: llmc/ops/weight_codes.py.
enum LlmcCodes {
  LLMC_INT8 = 0,
  LLMC_INT4 = 1,
  LLMC_FP8 = 2,
  LLMC_NF4 = 3,
  LLMC_MXFP4 = 4,
  LLMC_INT5 = 5,
  LLMC_INT6 = 6,
  LLMC_Q4_1 = 7,
  LLMC_Q5_1 = 8,
  LLMC_Q2_K = 9,
  LLMC_Q3_K = 10,
  LLMC_Q4_K = 11,
  LLMC_Q5_K = 12,
  LLMC_Q6_K = 13,
  LLMC_IQ4_NL = 14,
  LLMC_IQ4_XS = 15,
};
// The format that x is rounded to before the product: llmc/ops/token_codes.py.
enum LlmcXCodes { LLMC_X_NONE = 0, LLMC_X_INT8 = 1, LLMC_X_FP8 = 2 };
enum LlmcScales { LLMC_SCALES_F32 = 0, LLMC_SCALES_F16 = 1, LLMC_SCALES_BF16 = 2 };

// Code panels: output rows in groups of LLMC_PANEL (gated ones as above), k in groups that share a scale; the bytes of
// one group of one panel are
//   scale[lane]; zero[lane] as int16, if the weight has zeros; code words[k / codes a word][lane]
// 8 bits: a byte for each of four k. 4 bits: for each of eight k; byte i holds the i-th low, the (i + 4)-th high.
// Other numbers of bits: each 32 k are stored as bit planes. 5 and 6 bits have a plane of the low 4 bits and one of the
// rest; 3 bits have a plane of the low 2 bits and one of the rest. A plane of n bits takes n words: byte i holds the
// bits of k = i, i + 4, … from the lowest bit up. The last 32 k of a group are padded. Integers and their zeros are
// made unsigned by adding half of their range. Padding rows have scale 0. A group is a multiple of 16, or all of in;
// then the last word is padded. Blocked formats (kRecords in code_panels.h) store all headers of a panel before all of
// its codes. The header of a run of groups that share a float is
//   scale[lane]; minimum[lane], if the format has one; step halves[lane] as uint16
// Each lane's halves are a string of bits: the steps of the groups' scales, lowest bit first, then the steps of their
// minima.

// ---- weights without their zeros --------------------------------------------------------------------------------
// Sparse panels, and sparse code panels of 8 bits without zero points: the elements of the panels above, in the same
// order, without those that are zero (bytes of value 128: the code of zero).
//   offset[panel + 1] as uint64, in bytes from the beginning: where each panel's elements are, and where the last end
//   mask[panel][…] as uint64: bit i for the i-th of 64 elements; a row of 32 lanes is half a mask of f32, one of bf16,
//   two of codes; the last mask of a panel is filled up
//   of codes: scale[panel][group][lane]
//   the elements that are left, panel after panel; then 64 bytes that may be read, and mean nothing

// ---- weights that a function yields row by row -------------------------------------------------------------------
// For storages that have no products: what a weight is stored as, in rows of `stride` elements, and a function that
// writes elements k to k + count of a row of the weight. parts: in the order of the storage's row in storages.py.
typedef struct {
  const void* data;
  int64_t stride;
} LlmcStoredRows;
typedef void (*LlmcReadRow)(const LlmcStoredRows* parts, int64_t row, int64_t k, int64_t count, float* to);

// ---- choosing tokens -------------------------------------------------------------------------------------------
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

// ---- scratch ---------------------------------------------------------------------------------------------------
// Scratch bytes that one thread needs for attention of these shapes: what the pool must be created with.
int64_t llmc_paged_attention_scratch(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t value_dim);
// Scratch bytes that one thread needs for matrix products with at most max_in input channels and max_tokens tokens per
// step.
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
enum { LLMC_ENGINE_ABI = 4 };

// One step: T tokens of R requests; L of the rows need logits.
typedef struct {
  int32_t tokens, requests, logit_rows, max_blocks;
  const int32_t* input_ids;      // [T]
  const int32_t* positions;      // [T]
  const int32_t* slot_mapping;   // [T]
  const int32_t* query_starts;   // [R + 1]
  const int32_t* context_lens;   // [R]
  const int32_t* block_tables;   // [R, max_blocks]
  const int32_t* logit_row_ids;  // [L]
  const int64_t* tree_masks;     // [T]
  float* logits;                 // [L, vocab_size]
  int64_t sides;                 // bit i: program.json's side output i is wanted; it stays in the arena
  const float* hidden;           // [T, hidden_width] of a draft, else null
  const int32_t* adapter_of_token;      // [T]: 0 for none, or 1 + its slot in the pools; null: no token has one
  const int32_t* adapter_of_logit_row;  // [L]: of the rows' tokens; null like the other
  const int32_t* state_slots;    // [R] of an engine with states, else null
  const int32_t* compaction;     // llmc/ops/compact_kv.py; of a step that only moves rows, else null
} LlmcStep;

// One of several processes that run an engine together; null for one alone. memory: llmc_engine_ranks_bytes(ranks) bytes that
// all of them share, zero at first. round: how many exchanges there were, 0 at first. exchange: null, or of ranks that do not
// share it: LlmcExchange puts the bytes of this one's place into the same of all others, and theirs into this memory;
// the place of rank r begins r strides after the first. 0 if a rank was lost.
typedef int32_t (*LlmcExchange)(void* first, int64_t stride, int64_t bytes);
typedef struct {
  int32_t rank, ranks;
  void* memory;
  int64_t round;
  LlmcExchange exchange;
} LlmcRanks;
int64_t llmc_ranks_bytes(int32_t ranks);

// Pointers stay valid until close. weights: in the order of program.json; caches: k0, v0, k1, v1, …, then the states;
// arena: 64-byte aligned, of the size that program.json gives for the engine's limits; adapters: the pools of adapted
// products, in the order of program.json, each with its A, B and ranks (lora.cpp); null for an engine without.
typedef struct {
  const void* const* weights;
  void* const* caches;
  void* arena;
  int32_t threads;
  LlmcRanks* ranks;
  const void* const* adapters;
} LlmcBindings;

typedef struct LlmcEngine LlmcEngine;
int32_t llmc_engine_abi(void);
// Size of LlmcRanks.memory in bytes.
int64_t llmc_engine_ranks_bytes(int32_t ranks);
// The engine's assumptions about the memory in its bindings and steps, in the form of
// llmc/program/program_interface.py.
const char* llmc_engine_interface(void);
LlmcEngine* llmc_engine_open(const LlmcBindings* bindings);
void llmc_engine_step(LlmcEngine* engine, const LlmcStep* step);
// For engines of several ranks: runs a step that returns tokens instead of logits. All ranks call it together and get
// the same tokens. choices: temperature, seeds and counters of the rows, without filters, and where tokens and scores
// go.
void llmc_engine_step_choosing(LlmcEngine* engine, const LlmcStep* step, const LlmcChooseRows* choices);
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
