"""Compile grammars off the engine's loop: each is tried first in a process that is killed if it takes too long."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.errors import RequestError
from llmc.runtime.grammar import Grammar
from llmc.runtime.grammar_matcher import GrammarMask, grammar_tokenizer, new_matcher
from llmc.runtime.worker_process import WorkerError, WorkerProcess

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WORKER = "llmc.runtime.grammar_worker"
SECONDS = 5.0
_MEMORY_BYTES = 1 << 30
_KEPT = 64
_LONGEST_SOURCE = 1 << 20


class GrammarCompiler:
    """Makes masks for an engine's vocabulary; keeps the latest grammars compiled. For any thread, one at a time.

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
        self._worker: WorkerProcess | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def compile(self, grammar: Grammar) -> Callable[[], GrammarMask]:
        """Makes masks at the grammar's beginning, one for each choice. Raises RequestError for a bad or slow one."""
        if len(grammar.source) > _LONGEST_SOURCE:
            raise RequestError(
                f"the grammar has {len(grammar.source)} characters, and at most {_LONGEST_SOURCE} are compiled",
                at="grammar",
                fix="simplify it",
            )
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                matcher = new_matcher(self._tokenizer, self._tried(grammar))
                self._compiled[grammar] = matcher
                if len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(grammar)
        return lambda: GrammarMask(matcher.deep_copy(), self._vocab_size)

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            if self._worker is not None:
                self._worker.kill()
                self._worker = None

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return grammar_tokenizer(self._path, self._vocab_size, self._eos_token_ids)

    def _tried(self, grammar: Grammar) -> str:
        """The grammar in llguidance's notation, once it has been compiled in time in the worker."""
        tokenizer = self._tokenizer  # Says what is missing, which the worker could not.
        del tokenizer
        try:
            if self._worker is None:
                eos = ",".join(map(str, self._eos_token_ids))
                arguments = (str(self._path), str(self._vocab_size), eos, str(_MEMORY_BYTES))
                self._worker = WorkerProcess(WORKER, arguments)
            answer = self._worker.ask({"kind": grammar.kind.value, "source": grammar.source}, self._seconds)
        except WorkerError as error:
            if self._worker is not None:
                self._worker.kill()
                self._worker = None
            raise RequestError(
                f"the grammar could not be compiled: {error}", at="grammar", fix="simplify the grammar"
            ) from None
        if "error" in answer:
            raise RequestError(
                answer["error"], at="grammar", fix="correct or simplify the schema, expression or grammar"
            )
        return str(answer["grammar"])
