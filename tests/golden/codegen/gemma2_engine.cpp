// The step of tiny: 13 launches, 6 weights.
// Generated; each launch says which op, rewrite and line of the model's source it comes from.
#include <stddef.h>
#include <stdlib.h>
#include <time.h>

#include "loops.h"

using namespace llmc;

// As the runtime fills them.
static_assert(sizeof(LlmcStep) == 136 &&
              offsetof(LlmcStep, tokens) == 0 &&
              offsetof(LlmcStep, requests) == 4 &&
              offsetof(LlmcStep, logit_rows) == 8 &&
              offsetof(LlmcStep, max_blocks) == 12 &&
              offsetof(LlmcStep, input_ids) == 16 &&
              offsetof(LlmcStep, positions) == 24 &&
              offsetof(LlmcStep, slot_mapping) == 32 &&
              offsetof(LlmcStep, query_starts) == 40 &&
              offsetof(LlmcStep, context_lens) == 48 &&
              offsetof(LlmcStep, block_tables) == 56 &&
              offsetof(LlmcStep, logit_row_ids) == 64 &&
              offsetof(LlmcStep, tree_masks) == 72 &&
              offsetof(LlmcStep, logits) == 80 &&
              offsetof(LlmcStep, sides) == 88 &&
              offsetof(LlmcStep, hidden) == 96 &&
              offsetof(LlmcStep, adapter_of_token) == 104 &&
              offsetof(LlmcStep, adapter_of_logit_row) == 112 &&
              offsetof(LlmcStep, state_slots) == 120 &&
              offsetof(LlmcStep, compaction) == 128);
static_assert(sizeof(LlmcRanks) == 32 &&
              offsetof(LlmcRanks, rank) == 0 &&
              offsetof(LlmcRanks, ranks) == 4 &&
              offsetof(LlmcRanks, memory) == 8 &&
              offsetof(LlmcRanks, round) == 16 &&
              offsetof(LlmcRanks, exchange) == 24);
static_assert(sizeof(LlmcBindings) == 48 &&
              offsetof(LlmcBindings, weights) == 0 &&
              offsetof(LlmcBindings, caches) == 8 &&
              offsetof(LlmcBindings, arena) == 16 &&
              offsetof(LlmcBindings, threads) == 24 &&
              offsetof(LlmcBindings, ranks) == 32 &&
              offsetof(LlmcBindings, adapters) == 40);
static_assert(sizeof(LlmcChooseRows) == 88 &&
              offsetof(LlmcChooseRows, rows) == 0 &&
              offsetof(LlmcChooseRows, vocabulary) == 8 &&
              offsetof(LlmcChooseRows, logits) == 16 &&
              offsetof(LlmcChooseRows, temperature) == 24 &&
              offsetof(LlmcChooseRows, top_k) == 32 &&
              offsetof(LlmcChooseRows, top_p) == 40 &&
              offsetof(LlmcChooseRows, min_p) == 48 &&
              offsetof(LlmcChooseRows, seeds) == 56 &&
              offsetof(LlmcChooseRows, counters) == 64 &&
              offsetof(LlmcChooseRows, tokens) == 72 &&
              offsetof(LlmcChooseRows, scores) == 80);

// As the kernels declare them.
typedef struct {
  int64_t tokens, channels;
  const int32_t* ids;
  const void* weight;
  LlmcRows y;
} LlmcEmbedding;
typedef struct {
  int64_t tokens, heads, kv_heads, head_dim, value_dim, half, block_size;
  int32_t interleaved;
  LlmcRows q, k, v;
  const float* cos;
  const float* sin;
  void* k_cache;
  void* v_cache;
  const int32_t* slot_mapping;
  LlmcRows q_out;
  int64_t cache_group;
  int64_t value_group;
} LlmcKvWrite;
typedef struct {
  int64_t tokens, in, out;
  LlmcRows x;
  const void* weight;
  const float* bias;
  LlmcRows residual;
  LlmcRows y;
  int32_t activation;
  float scale;
  const int32_t* index;
  int32_t* pairs;
  int64_t slots, x_slots, experts;
  LlmcRows delta;
  const int32_t* adapters;
} LlmcLinear;
typedef struct {
  int64_t tokens, groups, channels;
  LlmcRows x;
  LlmcRows residual;
  const float* weight;
  const float* bias;
  float eps;
  LlmcRows y;
  LlmcRows sum;
} LlmcNorm;
typedef struct {
  int64_t tokens, requests, heads, kv_heads, head_dim, value_dim, block_size;
  LlmcRows q;
  const void* k_cache;
  const void* v_cache;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* block_tables;
  int64_t max_blocks;
  float scale;
  int64_t window;
  float softcap;
  const float* sinks;
  LlmcRows y;
  int64_t cache_group, value_group;
  const int64_t* tree_masks;
  const float* slopes;
  int64_t chunk;
  int64_t latent;
  LlmcRows k, v;

  int64_t sink_stride;
  const float* bias;
  int64_t extent;
  LlmcRows chosen;
  int64_t chosen_count;
  int64_t pinned;


  const void* recent_k;
  const void* recent_v;
  const int32_t* recent_tables;
  int64_t recent;
  const int32_t* recent_lens;
} LlmcPagedAttention;
typedef struct {
  int64_t tokens, half;
  const int32_t* positions;
  const float* inv_freq;
  float scale;
  float* cos;
  float* sin;
} LlmcRopeAngles;
typedef struct {
  int64_t selected, channels;
  const int32_t* rows;
  LlmcRows x, y;
} LlmcSelectRows;
extern "C" {
void llmc_embedding_panels_f32(LlmcPool*, const LlmcEmbedding*);
void llmc_kv_write_f32_f32(LlmcPool*, const LlmcKvWrite*);
void llmc_linear_f32(LlmcPool*, const LlmcLinear*);
void llmc_lm_head_f32(LlmcPool*, const LlmcLinear*);
void llmc_paged_attention_f32_f32(LlmcPool*, const LlmcPagedAttention*);
void llmc_rms_norm_f32(LlmcPool*, const LlmcNorm*);
void llmc_rope_angles(LlmcPool*, const LlmcRopeAngles*);
void llmc_select_rows_f32(LlmcPool*, const LlmcSelectRows*);
}

template <class Arguments>
static inline void run(void (*kernel)(LlmcPool*, const Arguments*), LlmcPool* pool, const Arguments& arguments) {
  kernel(pool, &arguments);
}

// mul_tensor
static void loop_0_mul(LlmcPool* pool, int64_t rows, float* __restrict p0) {
  parallel_ranges(pool, rows, 341, [=](int64_t begin, int64_t end, void*) LLMC_ONE_COPY {
    for (int64_t row = begin; row < end; row++) {
      #pragma omp simd
      for (int64_t c = 0; c < 48; c++) {
        const float v0 = loops::load(p0[row * 48 + c]);
        const float v2 = v0 * 6.928203230275509f;
        loops::store(p0[row * 48 + c], v2);
      }
    }
  });
}

// add_tensor
static void loop_1_add(LlmcPool* pool, int64_t rows, float* __restrict p0, const float* __restrict p1) {
  parallel_ranges(pool, rows, 341, [=](int64_t begin, int64_t end, void*) LLMC_ONE_COPY {
    for (int64_t row = begin; row < end; row++) {
      #pragma omp simd
      for (int64_t c = 0; c < 48; c++) {
        const float v0 = loops::load(p0[row * 48 + c]);
        const float v1 = loops::load(p1[row * 48 + c]);
        const float v2 = v0 + v1;
        loops::store(p0[row * 48 + c], v2);
      }
    }
  });
}

// div_tensor, tanh_default, mul_tensor_1
// tiny/model.py:7 in forward: logits = torch.tanh(logits / 3)
static void loop_2_div_tanh_mul(LlmcPool* pool, int64_t rows, float* __restrict p0) {
  parallel_ranges(pool, rows, 168, [=](int64_t begin, int64_t end, void*) LLMC_ONE_COPY {
    for (int64_t row = begin; row < end; row++) {
      #pragma omp simd
      for (int64_t c = 0; c < 97; c++) {
        const float v0 = loops::load(p0[row * 97 + c]);
        const float v2 = v0 / 3.0f;
        const float v3 = loops::tanh(v2);
        const float v4 = v3 * 3.0f;
        loops::store(p0[row * 97 + c], v4);
      }
    }
  });
}

struct LlmcEngine {
  const void* const* weights;
  void* const* caches;
  const void* const* adapters;
  char* arena;
  LlmcPool* pool;
  LlmcRanks* ranks;
  int64_t* times;
};

// When the launch before `number` ended, if anybody wants to know.
static inline void mark(int64_t* times, int64_t number) {
  if (times == nullptr) return;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  times[number] = static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

static int64_t scratch_bytes() {
  int64_t bytes = 0;
  auto need = [&](int64_t more) { bytes = more > bytes ? more : bytes; };
  need(llmc_choose_rows_scratch(97));
  need(llmc_linear_scratch(512, 48));
  need(llmc_paged_attention_scratch(4, 2, 12, 12));
  return bytes;
}

int32_t llmc_engine_abi(void) { return LLMC_ENGINE_ABI; }

int64_t llmc_engine_ranks_bytes(int32_t ranks) { return llmc_ranks_bytes(ranks); }

const char* llmc_engine_interface(void) {
  return
      "limits max_batch_tokens=512 max_sequences=64 max_logit_rows=512 max_model_len=64 block_size=16\n"
      "vocabulary 97\n"
      "weight 0 embed F32 [97, 48] panels 24576\n"
      "weight 1 inv_freq F32 [6] vector_f32 24\n"
      "weight 2 norm F32 [48] vector_f32 192\n"
      "weight 3 qkv_0 F32 [96, 48] panels 18432\n"
      "weight 4 o F32 [48, 48] panels 12288\n"
      "weight 5 head_norm F32 [12] vector_f32 48\n"
      "cache 0 2 heads of 12 and 12 F32 None\n"
      "arena 0 + 896 T + 192 L\n"
      "launches 13\n"
      "LlmcStep 136 tokens=0 requests=4 logit_rows=8 max_blocks=12 input_ids=16 positions=24 slot_mapping=32 query_starts=40 context_lens=48 block_tables=56 logit_row_ids=64 tree_masks=72 logits=80 sides=88 hidden=96 adapter_of_token=104 adapter_of_logit_row=112 state_slots=120 compaction=128\n"
      "LlmcRanks 32 rank=0 ranks=4 memory=8 round=16 exchange=24\n"
      "LlmcBindings 48 weights=0 caches=8 arena=16 threads=24 ranks=32 adapters=40\n"
      "LlmcChooseRows 88 rows=0 vocabulary=8 logits=16 temperature=24 top_k=32 top_p=40 min_p=48 seeds=56 counters=64 tokens=72 scores=80\n";
}

LlmcEngine* llmc_engine_open(const LlmcBindings* bindings) {
  LlmcEngine* engine = static_cast<LlmcEngine*>(malloc(sizeof(LlmcEngine)));
  if (engine == nullptr) return nullptr;
  LlmcPool* pool = llmc_pool_create(bindings->threads, scratch_bytes());
  if (pool == nullptr) {
    free(engine);
    return nullptr;
  }
  *engine = {bindings->weights, bindings->caches, bindings->adapters, static_cast<char*>(bindings->arena), pool,
             bindings->ranks, nullptr};
  return engine;
}

void llmc_engine_choose(LlmcEngine* engine, const LlmcChooseRows* rows) { llmc_choose_rows(engine->pool, rows); }

void llmc_engine_time_launches(LlmcEngine* engine, int64_t* times) { engine->times = times; }

void llmc_engine_close(LlmcEngine* engine) {
  llmc_pool_destroy(engine->pool);
  free(engine);
}

void llmc_engine_step(LlmcEngine* engine, const LlmcStep* step) {
  LlmcPool* const pool = engine->pool;
  int64_t* const times = engine->times;
  const void* const* const w = engine->weights;
  [[maybe_unused]] const int64_t T = step->tokens, L = step->logit_rows, R = step->requests;

  float* const embedding_default_ = reinterpret_cast<float*>(engine->arena + 384 * T);
  float* const rope_angles_default_ = reinterpret_cast<float*>(engine->arena + 768 * T);
  float* const rope_angles_default_result1_ = reinterpret_cast<float*>(engine->arena + 832 * T);
  float* const rms_norm_default_ = reinterpret_cast<float*>(engine->arena + 576 * T);
  float* const linear_default_ = reinterpret_cast<float*>(engine->arena + 0);
  float* const paged_attention_default_ = reinterpret_cast<float*>(engine->arena + 576 * T);
  float* const linear_default_1_ = reinterpret_cast<float*>(engine->arena + 0);
  float* const rms_norm_default_1_ = reinterpret_cast<float*>(engine->arena + 192 * T);
  float* const select_rows_default_ = reinterpret_cast<float*>(engine->arena + 896 * T);
  mark(times, 0);

  // embedding_default
  run(llmc_embedding_panels_f32, pool,
      {.tokens = T, .channels = 48, .ids = step->input_ids, .weight = (const float*)w[0 /* embed */],
       .y = {embedding_default_, 48}});
  mark(times, 1);

  // mul_tensor
  loop_0_mul(pool, T, embedding_default_);
  mark(times, 2);

  // rope_angles_default
  run(llmc_rope_angles, pool,
      {.tokens = T, .half = 6, .positions = step->positions, .inv_freq = (const float*)w[1 /* inv_freq */],
       .scale = 1.0f, .cos = rope_angles_default_, .sin = rope_angles_default_result1_});
  mark(times, 3);

  // rms_norm_default
  run(llmc_rms_norm_f32, pool,
      {.tokens = T, .groups = 1, .channels = 48, .x = {embedding_default_, 48},
       .weight = (const float*)w[2 /* norm */], .eps = 1e-06f, .y = {rms_norm_default_, 48}});
  mark(times, 4);

  // linear_default
  run(llmc_linear_f32, pool,
      {.tokens = T, .in = 48, .out = 96, .x = {rms_norm_default_, 48}, .weight = (const float*)w[3 /* qkv_0 */],
       .y = {linear_default_, 96}, .activation = LLMC_IDENTITY, .scale = 1.0f});
  mark(times, 5);

  // rope_kv_write_default
  run(llmc_kv_write_f32_f32, pool,
      {.tokens = T, .heads = 4, .kv_heads = 2, .head_dim = 12, .value_dim = 12, .half = 6, .block_size = 16,
       .interleaved = 0, .q = {linear_default_, 96}, .k = {linear_default_ + 48, 96}, .v = {linear_default_ + 72, 96},
       .cos = rope_angles_default_, .sin = rope_angles_default_result1_, .k_cache = engine->caches[0],
       .v_cache = engine->caches[1], .slot_mapping = step->slot_mapping, .q_out = {linear_default_, 96}});
  mark(times, 6);

  // paged_attention_default
  run(llmc_paged_attention_f32_f32, pool,
      {.tokens = T, .requests = R, .heads = 4, .kv_heads = 2, .head_dim = 12, .value_dim = 12, .block_size = 16,
       .q = {linear_default_, 96}, .k_cache = engine->caches[0], .v_cache = engine->caches[1],
       .query_starts = step->query_starts, .context_lens = step->context_lens, .block_tables = step->block_tables,
       .max_blocks = step->max_blocks, .scale = 0.28867513459481287f, .window = 6, .softcap = 5.0f,
       .y = {paged_attention_default_, 48}, .tree_masks = step->tree_masks, .latent = 0, .sink_stride = 0,
       .extent = 0, .chosen_count = 0});
  mark(times, 7);

  // linear_default_1
  run(llmc_linear_f32, pool,
      {.tokens = T, .in = 48, .out = 48, .x = {paged_attention_default_, 48}, .weight = (const float*)w[4 /* o */],
       .y = {linear_default_1_, 48}, .activation = LLMC_IDENTITY, .scale = 1.0f});
  mark(times, 8);

  // rms_norm_default_1
  run(llmc_rms_norm_f32, pool,
      {.tokens = T, .groups = 4, .channels = 12, .x = {linear_default_1_, 48},
       .weight = (const float*)w[5 /* head_norm */], .eps = 1e-06f, .y = {rms_norm_default_1_, 48}});
  mark(times, 9);

  // add_tensor
  loop_1_add(pool, T, embedding_default_, rms_norm_default_1_);
  mark(times, 10);

  // select_rows_default
  run(llmc_select_rows_f32, pool,
      {.selected = L, .channels = 48, .rows = step->logit_row_ids, .x = {embedding_default_, 48},
       .y = {select_rows_default_, 48}});
  mark(times, 11);

  // lm_head_default
  run(llmc_lm_head_f32, pool,
      {.tokens = L, .in = 48, .out = 97, .x = {select_rows_default_, 48}, .weight = (const float*)w[0 /* embed */],
       .y = {step->logits, 97}, .activation = LLMC_IDENTITY, .scale = 1.0f});
  mark(times, 12);

  // div_tensor, tanh_default, mul_tensor_1
  // tiny/model.py:7 in forward: logits = torch.tanh(logits / 3)
  loop_2_div_tanh_mul(pool, L, step->logits);
  mark(times, 13);
}
