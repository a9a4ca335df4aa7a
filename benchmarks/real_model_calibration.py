"""The table of benchmarks/real_models.py that says how long methods take that look at activations."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METHODS: tuple[dict[str, str], ...] = (
    {"quantize": "none"},
    {"quantize": "w8a8-smoothquant:xrow"},
    {"quantize": "int4-awq"},
    {"quantize": "int4-gptq"},
    {"quantize": "none", "sparsity": "wanda:0.5"},
    {"quantize": "none", "sparsity": "sparsegpt:0.5"},
    {"quantize": "auto:4.5"},
)
# A build in a fresh process: the first argument is the model, the second the engine, the third the options.
_BUILD = """
import json, sys, time
import torch
model, path, options, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
from llmc.compiler import build
begun, used = time.perf_counter(), time.process_time()
build(model, path, target="cpu", **json.loads(options))
print(json.dumps({"seconds": time.perf_counter() - begun, "processor": time.process_time() - used}))
"""


def calibration_times(model: Path, text: Path, threads: int, peer: str | None) -> Iterator[str]:
    """Whole builds on 32 sequences of 256 tokens, and llm-compressor's GPTQ of the same model where it is installed."""
    yield "| build | seconds | processor seconds |"
    yield "|---|--:|--:|"
    for options in METHODS:
        with tempfile.TemporaryDirectory() as directory:
            given = json.dumps(options | {"calibration": str(text)})
            path = str(Path(directory) / "engine.llmc")
            found = _timed([sys.executable, "-c", _BUILD, str(model), path, given, str(threads)])
        yield _line(" ".join(options.values()), found)
    if peer is not None:
        script = [peer, "-m", "benchmarks.llm_compressor_gptq", str(model), str(text), "--threads", str(threads)]
        yield _line("llm-compressor, GPTQ, groups of 64", _timed(script))


def _timed(command: list[str]) -> dict[str, Any]:
    """What the last line of a command's output says."""
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


def _line(name: str, found: dict[str, Any]) -> str:
    return f"| {name} | {found['seconds']:.0f} | {found['processor']:.0f} |"
