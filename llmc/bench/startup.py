"""How long a start takes: from a new process to the first token, and to a server's first answer."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from llmc.errors import LlmcError
from llmc.processes.worker_command import worker_command, worker_environment

_WAIT_SECONDS = 120.0


def first_token_seconds(engine: Path) -> float:
    """`llmc run` of one token, in its own process, to its end."""
    program = (
        "import sys, llmc\n"
        "with llmc.load(sys.argv[1]) as engine:\n"
        "    engine.generate([[1]], llmc.SamplingParams(max_tokens=1))\n"
    )
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(engine)], capture_output=True, text=True, env=worker_environment()
    )
    if done.returncode:
        # The last line of a traceback that is not indented names the error.
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip() and line[0] != " "), "")
        raise LlmcError(f"the engine does not run: {last}", at=engine, fix=f"see its whole output: llmc run {engine}")
    return time.perf_counter() - start


def server_seconds(engine: Path) -> float:
    """`llmc serve` from the start of its process to the answer of a completion of one token."""
    start = time.perf_counter()
    command = worker_command("llmc", "serve", str(engine), "--port", "0")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=_plain())
    try:
        address = _address(process, engine)
        body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{address}/v1/completions", body, headers)) as answer:
            answer.read()
        return time.perf_counter() - start
    except urllib.error.URLError as error:
        raise LlmcError(f"the server does not answer: {error}", at=engine) from None
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_WAIT_SECONDS)


def _address(process: subprocess.Popen[str], engine: Path) -> str:
    """The URL in the line that the server prints once it listens."""
    assert process.stderr is not None
    for line in process.stderr:
        address = next((word for word in line.split() if word.startswith("http://")), None)
        if address is not None:
            return address.rstrip("/")
    raise LlmcError("the server exited before it listened", at=engine, fix=f"see its output: llmc serve {engine}")


def _plain() -> dict[str, str]:
    """Return an environment without colors and line wrapping, so that the address can be read, and without an API
    key."""
    return {**{k: v for k, v in worker_environment().items() if k != "LLMC_API_KEY"}, "NO_COLOR": "1", "COLUMNS": "400"}
