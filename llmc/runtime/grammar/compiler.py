"""Compile grammars off the engine's loop: each is tried first in a process that is killed if it takes too long.

Most grammars take milliseconds. Each gets a short first try; those that need longer then wait for each other, and not
the others for them. A grammar's time runs from its request's arrival. If many bombs arrive at once, all of them are
refused in time.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.errors import LlmcError, RequestError, UnavailableError
from llmc.processes.worker_process import WorkerError, WorkerProcess
from llmc.runtime.grammar.grammar import Grammar
from llmc.runtime.grammar.mask_time import MaskTime
from llmc.runtime.grammar.matcher import GrammarMask, grammar_tokenizer, new_matcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WORKER = "llmc.runtime.grammar.worker"
# A schema of hundreds of fields takes about 0.1 s. A malicious grammar must get an answer within two seconds.
SECONDS = 1.5
# Time limit of the first attempt. Seats: number of concurrent attempts.
_QUICK_SECONDS = 0.2
_QUICK_SEATS, _LONG_SEATS = 2, 1
_WORKERS = _QUICK_SEATS + _LONG_SEATS
# They mostly wait for a seat, and none for longer than its grammar's time.
_THREADS = 32
_SHORTEST_TRY = 1e-3
# For the first worker, on a machine that is busy.
_START_SECONDS = 30.0
# Raised in a worker when its time is over.
_REPLY_SECONDS = 1.0
_MEMORY_BYTES = 1 << 30
_KEPT = 64
_LONGEST_SOURCE = 1 << 20
_MOST_NOTES = 20


@dataclass(frozen=True)
class CompiledGrammar:
    """Makes masks at a grammar's beginning, one for each choice of a request. notes: constraints of the grammar that
    are not enforced."""

    matcher: LLMatcher
    vocab_size: int
    notes: tuple[str, ...]

    def __call__(self, choices: int) -> Sequence[GrammarMask]:
        time = MaskTime()
        return [GrammarMask(self.matcher, self.vocab_size, time=time) for _ in range(choices)]


class GrammarCompiler:
    """Makes masks for an engine's vocabulary; keeps the latest grammars compiled. For any thread.

    tokenizer: tokenizer.json. seconds: that a grammar may take.
    """

    def __init__(
        self, tokenizer: Path, vocab_size: int, eos_token_ids: tuple[int, ...], seconds: float = SECONDS
    ) -> None:
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._seconds = seconds
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._quick = threading.BoundedSemaphore(_QUICK_SEATS)
        self._long = threading.BoundedSemaphore(_LONG_SEATS)
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._is_starting = self._is_closed = False
        self._wanted = 1
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._underway: dict[Grammar, Future[CompiledGrammar]] = {}

    def compile(self, grammar: Grammar, arrived: float | None = None) -> CompiledGrammar:
        """The grammar, compiled. Raises RequestError for a bad or slow one.

        arrived: when its request did, on the clock of time.monotonic; default now. The time until the first worker has
        started does not count. Raises UnavailableError if none has started in time.
        """
        length = len(grammar.source) + len(grammar.instead or "")
        if length > _LONGEST_SOURCE:
            raise RequestError(
                f"the grammar has {length} characters, and at most {_LONGEST_SOURCE} are compiled",
                at="grammar",
                fix="simplify it",
            )
        known = self.compiled(grammar)
        if known is not None:
            return known
        tokenizer = self._checked_tokenizer()
        is_first = self._wait_for_first_worker()
        deadline = (time.monotonic() if arrived is None or is_first else arrived) + self._seconds
        with self._lock:
            underway = self._underway.get(grammar)
            if underway is None:
                ours = self._underway[grammar] = Future()
        if underway is not None:
            # For a request with many prompts, and for simultaneous requests.
            try:
                return underway.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise self._too_slow() from None
        try:
            compiled = self._tried(grammar, tokenizer, deadline)
        except BaseException as error:
            ours.set_exception(error)
            raise
        else:
            ours.set_result(compiled)
            self._keep(grammar, compiled)
        finally:
            with self._lock:
                del self._underway[grammar]
        return compiled

    def compiled(self, grammar: Grammar) -> CompiledGrammar | None:
        """The compiled grammar, if it is kept; None if it would have to be compiled."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        return compiled

    def threads(self) -> ThreadPoolExecutor:
        """Threads to call `compile` from, of the caller's own."""
        return ThreadPoolExecutor(_THREADS, "llmc-grammar")

    def prepare(self) -> None:
        """Start a worker before the first grammar comes, which starts the others; wait for those that start now.

        Does nothing where grammars cannot be compiled.
        """
        with suppress(LlmcError):
            self._checked_tokenizer()
            with self._changed:
                self._start_missing()
                self._changed.wait_for(lambda: not self._is_starting)

    def close(self) -> None:
        """End the workers; a grammar that is being compiled is an error then, and each that comes later."""
        with self._changed:
            self._is_closed = True
            workers = [*self._idle, *self._busy]
            self._idle.clear()
            self._busy.clear()
            self._changed.notify_all()
        for worker in workers:
            worker.kill()

    def _wait_for_first_worker(self) -> bool:
        """Whether there was none, and one had to be waited for."""
        with self._changed:
            if self._idle or self._busy:
                return False
            self._start_missing()
            self._changed.wait_for(lambda: self._idle or self._busy or not self._is_starting, _START_SECONDS)
            return True

    def _checked_tokenizer(self) -> LLTokenizer:
        """Raises what a worker's process could not say."""
        tokenizer = self._tokenizer
        if isinstance(tokenizer, LlmcError):
            raise type(tokenizer)(tokenizer.problem, at=tokenizer.at, fix=tokenizer.fix) from tokenizer.__cause__
        return tokenizer

    @cached_property
    def _tokenizer(self) -> LLTokenizer | LlmcError:
        try:
            return grammar_tokenizer(self._path, self._vocab_size, self._eos_token_ids)
        except LlmcError as error:
            return error

    def _keep(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)

    def _tried(self, grammar: Grammar, tokenizer: LLTokenizer, deadline: float) -> CompiledGrammar:
        """The grammar, once it has been compiled in time in a worker."""
        try:
            answer = self._try(grammar, self._quick, _QUICK_SECONDS, deadline)
            if answer is not None and "late" in answer:
                answer = self._try(grammar, self._long, self._seconds, deadline) or answer
        except WorkerError as error:
            raise _failure(str(error)) from None
        if answer is None:
            raise UnavailableError("the grammar compiler is still starting", at="grammar", fix="try again later")
        if "late" in answer:
            raise self._too_slow()
        if "lost" in answer:
            raise _failure("it needs too much memory, or its process was ended")
        if "error" in answer:
            raise RequestError(answer["error"], at="grammar", fix=answer.get("fix") or "simplify the grammar")
        notes = tuple(answer["notes"])
        if len(notes) > _MOST_NOTES:
            notes = (*notes[:_MOST_NOTES], f"{len(notes) - _MOST_NOTES} more parts of the JSON schema are ignored")
        return CompiledGrammar(new_matcher(tokenizer, answer["grammar"]), self._vocab_size, notes)

    def _try(
        self, grammar: Grammar, seats: threading.BoundedSemaphore, seconds: float, deadline: float
    ) -> dict[str, Any] | None:
        """A worker's answer: `late` after `seconds` or at the deadline; None if no worker has started by then."""
        if time.monotonic() >= deadline or not seats.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return {"late": True}
        try:
            worker = self._take_worker(deadline)
            if worker is None:
                return None
            allowed = max(_SHORTEST_TRY, min(seconds, deadline - time.monotonic()))
            question = {**grammar.as_json(), "seconds": allowed}
            try:
                answer = worker.ask(question, allowed + _REPLY_SECONDS)
            except WorkerError:
                self._discard(worker)
                raise
            self._give_back(worker)
        finally:
            seats.release()
        return answer

    def _too_slow(self) -> RequestError:
        return _failure(f"it did not finish within {self._seconds:g} seconds")

    def _take_worker(self, deadline: float) -> WorkerProcess | None:
        """An idle one; one that is being started is waited for until the deadline."""
        with self._changed:
            self._wanted = _WORKERS
            self._start_missing()
            until = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: self._idle or self._is_closed or not self._is_starting, until)
            if self._idle:
                worker = self._idle.pop()
                self._busy.add(worker)
                return worker
            if self._is_closed:
                raise WorkerError("its process was ended")
            if self._is_starting:
                return None
        raise WorkerError("its process did not start")

    def _start_missing(self) -> None:
        """Start missing workers in the background, one at a time. Called with the lock held."""
        if not self._is_starting and not self._is_closed and len(self._idle) + len(self._busy) < self._wanted:
            self._is_starting = True
            threading.Thread(target=self._start, name="llmc-grammar-start", daemon=True).start()

    def _start(self) -> None:
        with suppress(WorkerError):  # Start a worker, and notify waiting threads.
            while self._add(self._new_worker()):
                pass
        with self._changed:
            self._is_starting = False
            self._changed.notify_all()

    def _add(self, worker: WorkerProcess) -> bool:
        """Whether yet another is missing."""
        with self._changed:
            if not self._is_closed:
                self._idle.append(worker)
                self._changed.notify()
                return len(self._idle) + len(self._busy) < self._wanted
        worker.kill()
        return False

    def _new_worker(self) -> WorkerProcess:
        eos = ",".join(map(str, self._eos_token_ids))
        return WorkerProcess(WORKER, (str(self._path), str(self._vocab_size), eos, str(_MEMORY_BYTES)))

    def _give_back(self, worker: WorkerProcess) -> None:
        with self._changed:
            if worker in self._busy:
                self._busy.remove(worker)
                self._idle.append(worker)
                self._changed.notify()

    def _discard(self, worker: WorkerProcess) -> None:
        with self._lock:
            is_ours = worker in self._busy
            self._busy.discard(worker)
        if is_ours:
            worker.kill()


def _failure(reason: str) -> RequestError:
    return RequestError(f"the grammar could not be compiled: {reason}", at="grammar", fix="simplify the grammar")
