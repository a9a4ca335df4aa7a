"""The line protocol between a benchmark and a contestant's process: one JSON request in, one JSON answer out.

This file and a contestant's own are all that its environment needs beside the peer: no llmc, no numpy.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from benchmarks.turns import end, stop, turn

ROOT = Path(__file__).parent.parent.parent


class Contestant(Protocol):
    """What is measured. Times in seconds."""

    def prefill(self, tokens: int) -> float:
        """Time from a prompt of that many tokens to the first output token, batch 1, nothing cached."""
        ...

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Mean time of a decode step of `batch` sequences that start with `context` tokens each."""
        ...


@runtime_checkable
class Speculator(Protocol):
    """What verifies drafts. Times in seconds."""

    def speculate(self, context: int, steps: int, drafts: int, acceptance: float) -> float:
        """Mean time of a token of one sequence that starts with `context` tokens, if each of so many drafts a step is
        right with that probability; making them takes no time."""
        ...


@runtime_checkable
class Reader(Protocol):
    """What can read memory between its steps. Times in seconds."""

    def decode_and_read(self, context: int, steps: int, nbytes: int) -> list[list[float]]:
        """Times of decode steps of one sequence that starts with `context` tokens, and of reading so many bytes after
        each."""
        ...


@runtime_checkable
class LongReader(Protocol):
    """What measures a long prompt once, not once for its prefill and once more for what follows. Times in seconds."""

    def prefill_and_decode(self, context: int, steps: int) -> list[float]:
        """Time of the prefill, batch 1 and nothing cached, and then of each decode step."""
        ...


@runtime_checkable
class DeepDecoder(Protocol):
    """A contestant that decodes after a long context without reading it first. Times in seconds."""

    def decode_behind(self, rows: int, steps: int) -> list[float]:
        """Time of each decode step of one sequence whose cache has `rows` rows, with any values in them."""
        ...


class BatchGenerator(Protocol):
    """What generates whole batches: a request is (prompt's token ids, tokens to generate). Times in seconds."""

    def generate(self, batches: list[list[tuple[list[int], int]]]) -> float:
        """Time for all batches, one after the other."""
        ...


class Embedder(Protocol):
    """What computes vectors of texts."""

    def embed(self, texts: list[str]) -> list[list[float]]:
        """The vector of each text, all in one batch."""
        ...


def serve_texts(embedder: Embedder) -> None:
    """Answer requests on standard input until it ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        texts, begun = json.loads(line)["texts"], time.perf_counter()
        vectors = embedder.embed(texts)
        print(json.dumps({"seconds": time.perf_counter() - begun, "vectors": vectors}), flush=True)


class Answerer(Protocol):
    """What continues prompts, greedily and one after the other."""

    def answer(self, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float]:
        """The next `tokens` tokens of each prompt, and the seconds for all of them."""
        ...


def serve_answers(answerer: Answerer) -> None:
    """Answer requests on standard input until it ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        said, seconds = answerer.answer(request["prompts"], request["tokens"])
        print(json.dumps({"said": said, "seconds": seconds}), flush=True)


def serve_batches(generator: BatchGenerator) -> None:
    """Answer requests on standard input until it ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": generator.generate(json.loads(line)["batches"])}), flush=True)


def serve(contestant: Contestant) -> None:
    """Answer requests on standard input until it ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        seconds: float | list[float] | list[list[float]]
        if request["measure"] == "prefill":
            seconds = contestant.prefill(request["tokens"])
        elif request["measure"] == "speculate":
            assert isinstance(contestant, Speculator)
            seconds = contestant.speculate(*(request[n] for n in ("context", "steps", "drafts", "acceptance")))
        elif request["measure"] == "decode and read":
            assert isinstance(contestant, Reader)
            seconds = contestant.decode_and_read(*(request[n] for n in ("context", "steps", "nbytes")))
        elif request["measure"] == "prefill and decode":
            assert isinstance(contestant, LongReader)
            seconds = contestant.prefill_and_decode(request["context"], request["steps"])
        elif request["measure"] == "decode behind":
            assert isinstance(contestant, DeepDecoder)
            seconds = contestant.decode_behind(request["rows"], request["steps"])
        else:
            seconds = contestant.decode(request["batch"], request["context"], request["steps"])
        print(json.dumps({"seconds": seconds}), flush=True)


class ContestantProcess:
    """A contestant in its own Python, started, and stopped until asked."""

    def __init__(self, name: str, python: str, module: str, arguments: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self._messages = TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed in __exit__)
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        self._answer()
        stop(self._process.pid)

    def __enter__(self) -> ContestantProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end(self._process.pid)
        self._process.wait()
        self._messages.close()

    def prefill(self, tokens: int) -> float:
        return self._ask({"measure": "prefill", "tokens": tokens})

    def decode(self, batch: int, context: int, steps: int) -> float:
        return self._ask({"measure": "decode", "batch": batch, "context": context, "steps": steps})

    def speculate(self, context: int, steps: int, drafts: int, acceptance: float) -> float:
        values = {"context": context, "steps": steps, "drafts": drafts, "acceptance": acceptance}
        return self._ask({"measure": "speculate", **values})

    def decode_and_read(self, context: int, steps: int, nbytes: int) -> tuple[list[float], list[float]]:
        """Times of decode steps, and of reading so many bytes after each."""
        stepped, read = self._ask_for_any(
            {"measure": "decode and read", "context": context, "steps": steps, "nbytes": nbytes}
        )
        return stepped, read

    def prefill_and_decode(self, context: int, steps: int) -> tuple[float, list[float]]:
        """Time of the prefill, and of each decode step."""
        prefill, *decode = self._ask_for_any({"measure": "prefill and decode", "context": context, "steps": steps})
        return prefill, decode

    def decode_behind(self, rows: int, steps: int) -> list[float]:
        """Time of each decode step of one sequence whose cache has `rows` rows."""
        times: list[float] = self._ask_for_any({"measure": "decode behind", "rows": rows, "steps": steps})
        return times

    def generate(self, batches: Sequence[Sequence[tuple[Sequence[int], int]]]) -> float:
        return self._ask({"batches": batches})

    def embed(self, texts: Sequence[str]) -> tuple[float, list[list[float]]]:
        """Time for the texts, and the vector of each."""
        answer = self._answer_to({"texts": list(texts)})
        return float(answer["seconds"]), answer["vectors"]

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[list[int]], float]:
        """The next tokens of prompts, of an Answerer, and seconds."""
        found = self._answer_to({"prompts": prompts, "tokens": tokens})
        return found["said"], found["seconds"]

    def _ask(self, request: dict[str, Any]) -> float:
        return float(self._ask_for_any(request))

    def _ask_for_any(self, request: dict[str, Any]) -> Any:
        return self._answer_to(request)["seconds"]

    def _answer_to(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with turn(self._process.pid):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        code = self._process.wait()
        self._messages.seek(0)
        raise RuntimeError(f"{self.name} ended with exit code {code}:\n{''.join(self._messages.readlines()[-8:])}")
