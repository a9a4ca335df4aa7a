"""llama.cpp through llama-cpp-python's low-level interface, over a GGUF file that benchmarks/gguf_file.py wrote."""

from __future__ import annotations

import argparse
import ctypes
import random
import time

import llama_cpp

from benchmarks.contestants.protocol import serve

# Tokens that are read at once to fill a cache.
_PIECE = 512


class LlamaCpp:
    def __init__(self, path: str, threads: int, flash_attention: bool = False) -> None:
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads = threads
        self._flash_attention = flash_attention
        self._random = random.Random(0)

    def prefill(self, tokens: int) -> float:
        context = self._context(1, tokens + 8)
        ids = self._tokens(tokens)
        start = time.perf_counter()
        self._decode(context, [(position, 0, token) for position, token in enumerate(ids)], last_only=True)
        seconds = time.perf_counter() - start
        llama_cpp.llama_free(context)
        return seconds

    def decode(self, batch: int, context: int, steps: int) -> float:
        state = self._context(batch, (context + steps + 8) * batch)
        for sequence in range(batch):
            ids = self._tokens(context)
            self._decode(state, [(position, sequence, token) for position, token in enumerate(ids)], last_only=True)
        start = time.perf_counter()
        for step in range(steps):
            entries = [(context + step, sequence, token) for sequence, token in enumerate(self._tokens(batch))]
            self._decode(state, entries, last_only=False)
        seconds = time.perf_counter() - start
        llama_cpp.llama_free(state)
        return seconds / steps

    def prefill_and_decode(self, context: int, steps: int) -> list[float]:
        state, seconds = self._context(1, context + steps + 8), list[float]()
        ids = self._tokens(context)
        batches = [[(position, 0, token) for position, token in enumerate(ids)]]
        batches += [[(context + step, 0, token)] for step, token in enumerate(self._tokens(steps))]
        for batch in batches:
            start = time.perf_counter()
            self._decode(state, batch, last_only=True)
            seconds.append(time.perf_counter() - start)
        llama_cpp.llama_free(state)
        return seconds

    def decode_behind(self, rows: int, steps: int) -> list[float]:
        """Read a short text once, copy it to other sequences, and join them into one.

        The first step is not counted, because it rotates the copied keys to their new positions.
        """
        pieces = -(-rows // _PIECE)
        state = self._context(1 + pieces, pieces * _PIECE + steps + 8, is_shared=True)
        memory = llama_cpp.llama_get_memory(state)
        self._decode(state, [(place, 1, token) for place, token in enumerate(self._tokens(_PIECE))], last_only=True)
        size = llama_cpp.llama_state_seq_get_size(state, 1)
        piece = (ctypes.c_uint8 * size)()
        if llama_cpp.llama_state_seq_get_data(state, piece, size, 1) != size:
            raise RuntimeError("llama.cpp did not copy a sequence")
        for number in range(pieces):
            if number and not llama_cpp.llama_state_seq_set_data(state, piece, size, 1 + number):
                raise RuntimeError(f"llama.cpp has no room for {rows} rows")
            llama_cpp.llama_memory_seq_add(memory, 1 + number, -1, -1, number * _PIECE)
            llama_cpp.llama_memory_seq_cp(memory, 1 + number, 0, -1, -1)
        llama_cpp.llama_memory_seq_rm(memory, 0, rows, -1)
        seconds = list[float]()
        for step, token in enumerate(self._tokens(1 + steps)):
            start = time.perf_counter()
            self._decode(state, [(rows + step, 0, token)], last_only=True)
            seconds.append(time.perf_counter() - start)
        llama_cpp.llama_free(state)
        return seconds[1:]

    def speculate(self, context: int, steps: int, drafts: int, acceptance: float) -> float:
        state = self._context(1, context + steps + 2 * drafts + 8)
        ids = self._tokens(context)
        self._decode(state, [(position, 0, token) for position, token in enumerate(ids)], last_only=True)
        written = 0
        start = time.perf_counter()
        while written < steps:
            place = context + written
            entries = [(place + index, 0, token) for index, token in enumerate(self._tokens(1 + drafts))]
            self._decode(state, entries, last_only=False)
            right = next((i for i in range(drafts) if self._random.random() >= acceptance), drafts)
            written += 1 + right
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(state), 0, context + written, -1)
        seconds = time.perf_counter() - start
        llama_cpp.llama_free(state)
        return seconds / written

    def _context(self, sequences: int, length: int, *, is_shared: bool = False) -> ctypes.c_void_p:
        """is_shared: all sequences have one cache of `length` rows."""
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = length
        parameters.n_batch = _PIECE if is_shared else max(length // sequences, sequences)
        parameters.n_ubatch = 512
        parameters.n_seq_max = sequences
        parameters.kv_unified = is_shared
        parameters.n_threads = self._threads
        parameters.n_threads_batch = self._threads
        if self._flash_attention:
            parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        context: ctypes.c_void_p = llama_cpp.llama_init_from_model(self._model, parameters)
        return context

    def _decode(self, context: ctypes.c_void_p, entries: list[tuple[int, int, int]], *, last_only: bool) -> None:
        batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for index, (position, sequence, token) in enumerate(entries):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = not last_only or index == len(entries) - 1
        status = llama_cpp.llama_decode(context, batch)
        # The logits are computed lazily on some backends; reading them ends the step.
        llama_cpp.llama_synchronize(context)
        llama_cpp.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flash-attention", action="store_true", help="instead of leaving it to llama.cpp")
    arguments = parser.parse_args()
    serve(LlamaCpp(arguments.gguf, arguments.threads, arguments.flash_attention))


if __name__ == "__main__":
    main()
