"""What llama.cpp makes of a GGUF file: runs in an environment that has llama-cpp-python, and needs nothing of llmc's.

    PYTHON llama_cpp_answers.py FILE '[1, 2, 3]' '["a text"]'

prints JSON: `logits` of each token, and `ids` of each text.
"""

from __future__ import annotations

import ctypes
import json
import sys

import llama_cpp

F32 = 0


def main(path: str, tokens: list[int], texts: list[str]) -> None:
    """Keys and values stay in fp32, so that a file of F32 is computed in that."""
    llama_cpp.llama_log_set(_QUIET, ctypes.c_void_p(0))
    model = llama_cpp.Llama(
        path, n_ctx=64, n_batch=64, n_threads=1, logits_all=True, verbose=False, type_k=F32, type_v=F32, use_mmap=False
    )
    model.eval(tokens)
    logits = [[float(value) for value in row] for row in model.scores[: len(tokens)]]
    ids = [model.tokenize(text.encode(), add_bos=True, special=True) for text in texts]
    print(json.dumps({"logits": logits, "ids": ids}))


_QUIET = llama_cpp.llama_log_callback(lambda level, text, data: None)

if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
