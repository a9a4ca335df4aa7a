// llmc::layer_norm and llmc::add_layer_norm. Source: Ba, Kiros and Hinton 2016.
#include "norm_row.h"

void llmc_layer_norm_f32(LlmcPool* pool, const LlmcNorm* arguments) { llmc::norm<true, float>(pool, *arguments); }
void llmc_layer_norm_bf16(LlmcPool* pool, const LlmcNorm* arguments) { llmc::norm<true, llmc::bf16>(pool, *arguments); }
