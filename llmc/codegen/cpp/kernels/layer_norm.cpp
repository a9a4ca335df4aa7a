// llmc::layer_norm and llmc::add_layer_norm. Source: Ba, Kiros and Hinton 2016.
#include "norm_row.h"

LLMC_KERNEL(LlmcNorm, layer_norm_f32, llmc::norm<true, float>)
LLMC_KERNEL(LlmcNorm, layer_norm_bf16, llmc::norm<true, llmc::bf16>)
