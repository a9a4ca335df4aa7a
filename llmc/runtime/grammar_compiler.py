"""Compile grammars off the engine's loop: each is tried first in a process that is killed if it takes too long."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.errors import LlmcError, RequestError
from llmc.runtime.grammar import Grammar
from llmc.runtime.grammar_matcher import GrammarMask, grammar_tokenizer, new_matcher
from llmc.runtime.worker_process import WorkerError, WorkerProcess

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WORKER = "llmc.runtime.grammar_worker"
# A schema of hundreds of fields takes some 0.1 s. Who sends a bomb is to have an answer within two seconds.
SECONDS = 1.5
# Grammars that are compiled at a time: a bomb must not keep all others waiting.
_WORKERS = 2
_MEMORY_BYTES = 1 << 30
_KEPT = 64
_LONGEST_SOURCE = 1 << 20
NewMask = Callable[[], GrammarMask]


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
        self._seats = threading.BoundedSemaphore(_WORKERS)
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._is_closed = False
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def compile(self, grammar: Grammar) -> NewMask:
        """Makes masks at the grammar's beginning, one for each choice. Raises RequestError for a bad or slow one."""
        if len(grammar.source) > _LONGEST_SOURCE:
            raise RequestError(
                f"the grammar has {len(grammar.source)} characters, and at most {_LONGEST_SOURCE} are compiled",
                at="grammar",
                fix="simplify it",
            )
        known = self.compiled(grammar)
        if known is not None:
            return known
        with self._seats:
            matcher = new_matcher(self._tokenizer, self._tried(grammar))
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return self._new_mask(matcher)

    def compiled(self, grammar: Grammar) -> NewMask | None:
        """The same at once, if the grammar is among those that are kept."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                return None
            self._compiled.move_to_end(grammar)
        return self._new_mask(matcher)

    def threads(self) -> ThreadPoolExecutor:
        """Threads to call `compile` from, of the caller's own: as many as compile at a time."""
        return ThreadPoolExecutor(_WORKERS, "llmc-grammar")

    def prepare(self) -> None:
        """Start a worker before the first grammar comes; does nothing where grammars cannot be compiled."""
        with suppress(LlmcError):
            tokenizer = self._tokenizer
            del tokenizer
            with self._seats, suppress(WorkerError):
                self._give_back(self._take_worker())

    def close(self) -> None:
        """End the workers; a grammar that is being compiled is an error then, and each that comes later."""
        with self._lock:
            self._is_closed = True
            workers = [*self._idle, *self._busy]
            self._idle.clear()
            self._busy.clear()
        for worker in workers:
            worker.kill()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return grammar_tokenizer(self._path, self._vocab_size, self._eos_token_ids)

    def _new_mask(self, matcher: LLMatcher) -> NewMask:
        return lambda: GrammarMask(matcher.deep_copy(), self._vocab_size)

    def _tried(self, grammar: Grammar) -> str:
        """The grammar in llguidance's notation, once it has been compiled in time in a worker."""
        tokenizer = self._tokenizer  # Says what is missing, which the worker could not.
        del tokenizer
        try:
            worker = self._take_worker()
            try:
                answer = worker.ask({"kind": grammar.kind.value, "source": grammar.source}, self._seconds)
            except WorkerError:
                self._discard(worker)
                raise
        except WorkerError as error:
            raise RequestError(
                f"the grammar could not be compiled: {error}", at="grammar", fix="simplify the grammar"
            ) from None
        self._give_back(worker)
        if "error" in answer:
            raise RequestError(
                answer["error"], at="grammar", fix="correct or simplify the schema, expression or grammar"
            )
        return str(answer["grammar"])

    def _take_worker(self) -> WorkerProcess:
        with self._lock:
            if self._idle:
                worker = self._idle.pop()
                self._busy.add(worker)
                return worker
        eos = ",".join(map(str, self._eos_token_ids))
        worker = WorkerProcess(WORKER, (str(self._path), str(self._vocab_size), eos, str(_MEMORY_BYTES)))
        with self._lock:
            if not self._is_closed:
                self._busy.add(worker)
                return worker
        worker.kill()
        raise WorkerError("its process was ended")

    def _give_back(self, worker: WorkerProcess) -> None:
        with self._lock:
            if worker in self._busy:
                self._busy.remove(worker)
                self._idle.append(worker)

    def _discard(self, worker: WorkerProcess) -> None:
        with self._lock:
            is_ours = worker in self._busy
            self._busy.discard(worker)
        if is_ours:
            worker.kill()
