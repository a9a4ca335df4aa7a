"""Exceptions injected where the work for a request crosses the boundary, which is found by watching what crosses it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

import llmc
from llmc.runtime.requests import boundary
from llmc.runtime.requests.generation_job import GenerationJob
from llmc.runtime.requests.generation_request import GenerationRequest
from llmc.runtime.requests.job_builder import JobBuilder
from llmc.runtime.requests.request import Origin, Request
from llmc.runtime.sampling.sampler import Sampler

ROOT = Path(llmc.__file__).parent
# What things that cross the boundary call the request, the job or the sampler that they are of.
_OWNERS = ("request", "_request", "job", "first", "sampler", "chunk")


class Injected(Exception):
    """What a library might raise."""


class Panic(BaseException):
    """As panics of libraries in Rust, which are no Exception."""


@dataclass(frozen=True)
class Crossing:
    """A call across the boundary. site: file and line of the call. work: what is called there."""

    site: str
    work: str


@dataclass
class Injector:
    """Watches what is done for the victim, and raises in one of its crossings.

    victim: the prompt of the request that faults are injected into. target: the crossing that raises. nth: which time.
    is_late: after its work is done. crossings: how often the victim has made each.
    """

    victim: tuple[int, ...]
    target: Crossing | None = None
    nth: int = 1
    is_late: bool = False
    error: Callable[[str], BaseException] = Injected
    crossings: dict[Crossing, int] = field(default_factory=dict)
    _origins: list[Origin] = field(default_factory=list)
    _samplers: list[Sampler] = field(default_factory=list)

    def aim(self, target: Crossing | None, nth: int = 1, *, is_late: bool = False) -> None:
        """Raise there in the next run, or nowhere."""
        self.target, self.nth, self.is_late = target, nth, is_late
        self.crossings.clear()
        self._origins.clear()
        self._samplers.clear()

    def note_job(self, request: GenerationRequest, job: GenerationJob) -> None:
        """A request begins."""
        if request.prompt_token_ids == self.victim:
            self._origins.append(job.first.origin)
            self._samplers += [sequence.sampler for sequence in job.sequences if hasattr(sequence, "sampler")]

    def crossed(self, real: Callable[..., Any], work: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """`attempt`, with a fault where one is due."""
        if not self._is_of_victim(work, given):
            return real(work, *given)
        crossing = Crossing(_site(), _name(work))
        count = self.crossings[crossing] = self.crossings.get(crossing, 0) + 1
        if crossing != self.target or count != self.nth:
            return real(work, *given)

        def broken(*arguments: Any) -> Any:
            if self.is_late:
                work(*arguments)
            raise self.error("injected")

        return real(broken, *given)

    def _is_of_victim(self, work: Callable[..., Any], given: tuple[Any, ...]) -> bool:
        pending = [getattr(work, "__self__", None), *given, *_closed_over(work)]
        seen: list[object] = []
        while pending:
            value = pending.pop()
            if value is None or any(value is other for other in seen):
                continue
            seen.append(value)
            if isinstance(value, Request):
                if any(value.origin is origin for origin in self._origins):
                    return True
            elif isinstance(value, Sampler):
                if any(value is sampler for sampler in self._samplers):
                    return True
            elif isinstance(value, list | tuple):
                pending += value if len(value) < 64 else ()
            else:
                pending += [getattr(value, name, None) for name in _OWNERS]
        return False


@contextmanager
def injecting(injector: Injector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Injector]:
    """Watch all crossings of all engines until the end."""
    real, build = boundary.attempt, JobBuilder.job

    def attempt(work: Callable[..., Any], *given: Any) -> Any:
        return injector.crossed(real, work, given)

    def job(self: JobBuilder, request: GenerationRequest, **more: Any) -> GenerationJob:
        made = build(self, request, **more)
        injector.note_job(request, made)
        return made

    with monkeypatch.context() as patched:
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and getattr(module, "attempt", None) is real:
                patched.setattr(module, "attempt", attempt)
        patched.setattr(JobBuilder, "job", job)
        yield injector


def sites() -> set[str]:
    """Every place in the runtime that calls across the boundary, by its source."""
    places = set()
    for path in sorted((ROOT / "runtime").rglob("*.py")):
        if path == Path(boundary.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("attempt", "attempts")
            ):
                places.add(f"{path.relative_to(ROOT)}:{node.lineno}")
    return places


def _site() -> str:
    """Where `attempt` or `attempts` was called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in (__file__, boundary.__file__):
        frame = frame.f_back
    assert frame is not None
    return f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_lineno}"


def _name(work: Callable[..., Any]) -> str:
    plain = work.func if isinstance(work, partial) else work
    return str(getattr(plain, "__qualname__", plain))


def _closed_over(work: Callable[..., Any]) -> list[object]:
    """What a function without arguments of its own looks at."""
    plain = work.func if isinstance(work, partial) else work
    return [cell.cell_contents for cell in getattr(plain, "__closure__", None) or ()]
