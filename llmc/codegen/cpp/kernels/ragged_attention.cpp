// llmc::ragged_attention: the texts of a step, in which every token sees every other of its text.
//
// It is attention over a cache of blocks of one position: the step's own keys and values, where a text's first lies at
// its first token.
#include "paged_attention.h"

LLMC_KERNEL(LlmcPagedAttention, ragged_attention_f32, llmc::attention::attend<float, float>)
LLMC_KERNEL(LlmcPagedAttention, ragged_attention_bf16, llmc::attention::attend<llmc::bf16, llmc::bf16>)
