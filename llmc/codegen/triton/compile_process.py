"""A process that compiles Triton kernels (compile_worker.py): how it is started, asked and ended."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.errors import ToolchainError
from llmc.processes.lifeline import Lifeline
from llmc.processes.worker_command import worker_command, worker_environment


class CompileProcess:
    """It starts with importing torch and Triton. cache: Triton's own. scratch: for temporary files."""

    def __init__(self, cache: Path, scratch: Path) -> None:
        self._lifeline = Lifeline()
        try:
            self.process = _start(cache, scratch, self._lifeline.worker_end)
        finally:
            self._lifeline.started()
        self._is_asked = False

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer. Raises ToolchainError if the process has ended without one."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self._is_asked = True
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ToolchainError(
                "a process that compiles Triton kernels died",
                at=f"{request['source']}: {request['function']}",
                fix="its last words are above; if there are none, the machine may have run out of memory",
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self, at_once: bool) -> None:
        """End the process. at_once: kill it even while it compiles. A process without a request is always killed, since
        it may still be importing modules."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if at_once or not self._is_asked:
            self.process.kill()
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self._lifeline.close()


def _start(cache: Path, scratch: Path, lifeline: int) -> subprocess.Popen[str]:
    environment = {name: value for name, value in worker_environment().items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TMPDIR": str(scratch)}
    # Line tables hold the paths of this machine's files; what is compiled for NVIDIA's GPUs has its own way with them.
    environment["TRITON_DISABLE_LINE_INFO"] = "1"
    return subprocess.Popen(
        worker_command("llmc.codegen.triton.compile_worker", str(lifeline)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        pass_fds=(lifeline,),
    )
