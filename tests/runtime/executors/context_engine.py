"""A compiled engine written by hand against kernels/api.h: its next token is a checksum of everything that it was fed.

It reads each token back from the paged cache, so a wrong slot, table, length or position changes what it says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmc.codegen.cpp.kernel_api import kernel_include_dir
from llmc.codegen.cpp.toolchain import find_toolchain, run_tool
from llmc.engine_format import Manifest, ModelRecord, TargetRecord
from llmc.engine_format.writer import EngineWriter
from llmc.program import Affine, CacheSlot, Layout, Limits, Program, WeightSlot
from llmc.program.program_interface import interface_text
from llmc.program.program_json import program_to_json
from llmc.targets import resolve_target

VOCAB = 101
LIMITS = Limits(max_batch_tokens=12, max_sequences=4, max_logit_rows=5, max_model_len=36, block_size=8)

SLOT = WeightSlot("weight", "F32", (VOCAB,), Layout.VECTOR_F32, 4 * VOCAB)
PROGRAM = Program(LIMITS, VOCAB, Affine(tokens=4), Affine(tokens=4), (), (SLOT,), (CacheSlot(1, 1, 2, "F32"),))

SOURCE = """
#include "api.h"
struct LlmcEngine { LlmcBindings bindings; };
extern "C" {
int32_t llmc_engine_abi(void) { return LLMC_ENGINE_ABI; }
const char* llmc_engine_interface(void) { return INTERFACE; }
LlmcEngine* llmc_engine_open(const LlmcBindings* b) { return b->threads > 9 ? nullptr : new LlmcEngine{*b}; }
void llmc_engine_close(LlmcEngine* engine) { delete engine; }
void llmc_engine_step(LlmcEngine* engine, const LlmcStep* s) {
  const int block = 8, vocab = 101;
  float* k = (float*)engine->bindings.caches[0];
  float* v = (float*)engine->bindings.caches[1];
  const float* weight = (const float*)engine->bindings.weights[0];
  int32_t* arena = (int32_t*)engine->bindings.arena;
  for (int t = 0; t < s->tokens; t++) {
    k[s->slot_mapping[t]] = (float)s->input_ids[t];
    v[2 * s->slot_mapping[t]] = (float)s->positions[t];
  }
  for (int r = 0; r < s->requests; r++) {
    for (int t = s->query_starts[r]; t < s->query_starts[r + 1]; t++) {
      long sum = 0;
      int last = s->context_lens[r] - (s->query_starts[r + 1] - t);
      for (int p = 0; p <= last; p++) {
        long slot = (long)s->block_tables[r * s->max_blocks + p / block] * block + p % block;
        sum += (long)k[slot] * (p + 1) + 3 * (long)v[2 * slot];
      }
      arena[t] = (int32_t)(sum % vocab);
    }
  }
  for (int l = 0; l < s->logit_rows; l++)
    for (int c = 0; c < vocab; c++)
      s->logits[l * vocab + c] = weight[c] + (arena[s->logit_row_ids[l]] == c ? 10.0f : 0.0f);
}
}
"""


def next_token(tokens: Sequence[int]) -> int:
    """What the engine says after these tokens."""
    return sum(token * (p + 1) + 3 * p for p, token in enumerate(tokens)) % VOCAB


def continuation(tokens: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[-count:]


def compile_library(path: Path, source: str = SOURCE) -> None:
    """A shared library of C++ text."""
    text = path.with_suffix(".cpp")
    interface = json.dumps(interface_text(PROGRAM))
    text.write_text(f"#define INTERFACE {interface}\n{source}", encoding="utf-8")
    options = ["-O1", "-shared", "-fPIC", f"-I{kernel_include_dir()}", str(text), "-o", str(path)]
    run_tool([*find_toolchain().compiler, *options], source=text, scratch=path.parent)


def write_context_engine(path: Path, library: Path) -> Path:
    """An engine for this machine around a library that `compile_library` made."""
    weight = np.linspace(0, 1, VOCAB, dtype=np.float32)
    with EngineWriter(path) as writer:
        writer.write_text("program.json", program_to_json(PROGRAM))
        writer.copy_file(f"kernels/engine-{hashlib.sha256(library.read_bytes()).hexdigest()[:16]}.so", library)
        writer.write_weights([(SLOT, lambda: weight)])
        writer.finish(
            Manifest(
                llmc_version="0",
                model=ModelRecord("context", "module", VOCAB, None, "float32", None, (), VOCAB),
                target=TargetRecord.of(resolve_target("cpu-portable")),
                options={},
                limits=LIMITS,
                cost={},
                memory={},
                passes=(),
            )
        )
    return path
