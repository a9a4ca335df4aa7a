// Matrix products with weights without their zeros.
#include "sparse_linear.h"

LLMC_KERNELS(LlmcLinear, sparse_linear, llmc::sparse_linear)
LLMC_KERNELS(LlmcLinear, sparse_gated_linear, llmc::sparse_gated_linear)
LLMC_KERNELS(LlmcLinear, sparse_lm_head, llmc::sparse_lm_head)
