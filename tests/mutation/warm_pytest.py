"""pytest in processes that have imported other people's packages before: two thirds of what a short run takes.

Run as a program it reads runs from stdin, a JSON object a line, and answers each with its exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer
from typing import Any

# Not Triton: tests/conftest.py says first how its kernels are run. Nothing of llmc: it is the copy's that is tested.
PACKAGES = (
    "torch", "torch.export", "torch.fx.experimental.symbolic_shapes", "transformers", "sympy", "pytest", "hypothesis",
    "fastapi", "httpx", "onnx", "pydantic", "rich", "typer", "networkx", "safetensors.torch",
)  # fmt: skip


class WarmPytest:
    """A process that forks one for each run."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(
        self, copy: Path, arguments: list[str], environment: dict[str, str], seconds: int
    ) -> tuple[int | None, str]:
        """The exit code and the output of pytest in a copy of the tree; None if it was killed after so long."""
        assert self._process.stdin is not None and self._process.stdout is not None
        output = copy / "build" / "output.txt"
        run = {"copy": str(copy), "arguments": arguments, "environment": environment, "output": str(output)}
        self._process.stdin.write(json.dumps(run | {"seconds": seconds}) + "\n")
        self._process.stdin.flush()
        code = json.loads(self._process.stdout.readline())
        return code, output.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _serve() -> None:
    for name in PACKAGES:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        run = json.loads(line)
        child = os.fork()
        if child == 0:
            _test(run)
        late = Timer(run["seconds"], os.killpg, (child, signal.SIGKILL))
        late.start()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        late.cancel()
        answers.write(json.dumps(None if code == -signal.SIGKILL else code) + "\n")
        answers.flush()


def _test(run: dict[str, Any]) -> None:
    import pytest

    os.setsid()
    os.chdir(run["copy"])
    os.environ.clear()
    os.environ.update(run["environment"])
    sys.path.insert(0, run["copy"])
    output = os.open(run["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    code = pytest.main(run["arguments"])
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
