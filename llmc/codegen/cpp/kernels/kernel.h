// How a file defines kernels. It declares their arguments too, a struct of plain fields, or the header that it shares
// with others does: llmc/codegen/cpp/kernel_api.py reads both there, for the engines and processes that call them.
#pragma once
#include "api.h"
#include "bf16.h"

// Marks a function that is called from outside; everything else is compiled with -fvisibility=hidden.
#define LLMC_EXPORT extern "C" __attribute__((visibility("default")))

// llmc_NAME: what follows the name, called with the pool and the arguments.
#define LLMC_KERNEL(Arguments, name, ...) \
  LLMC_EXPORT void llmc_##name(LlmcPool* pool, const Arguments* arguments) { __VA_ARGS__(pool, *arguments); }

// llmc_NAME_f32 and llmc_NAME_bf16: a template of the element type.
#define LLMC_KERNELS(Arguments, name, function) \
  LLMC_KERNEL(Arguments, name##_f32, function<float>) \
  LLMC_KERNEL(Arguments, name##_bf16, function<llmc::bf16>)
