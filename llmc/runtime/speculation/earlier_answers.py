"""Outputs of earlier requests, kept for later ones of the same tenant: suffix automata by salt, with a size limit.

An automaton does not support removal. A tenant's answers therefore go into batches of up to half of the room, and the
oldest batch of the least recently used tenant is dropped as a whole.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmc.runtime.speculation.suffix_automaton import SuffixAutomaton

# Maximum tokens of all tenants' answers: about 230 MiB, at 460 bytes per token of English text.
MAX_TOKENS = 1 << 19


@dataclass(slots=True)
class _Batch:
    automaton: SuffixAutomaton
    answers: int = 0
    tokens: int = 0


class EarlierAnswers:
    """Keeps at most `answers` answers and `tokens` tokens in total, 0 for none. depth: as in SuffixAutomaton."""

    def __init__(self, depth: int, most_answers: int, most_tokens: int = MAX_TOKENS) -> None:
        self._depth = depth
        self._most_answers = most_answers
        self._most_tokens = most_tokens
        self._tenants: OrderedDict[bytes, deque[_Batch]] = OrderedDict()
        self.answers = self.tokens = 0

    def of(self, salt: bytes | None) -> Iterable[SuffixAutomaton]:
        """The outputs of this tenant's requests; none for a salt of None, which shares nothing."""
        batches = None if salt is None else self._tenants.get(salt)
        if salt is None or batches is None:
            return ()
        self._tenants.move_to_end(salt)
        return [batch.automaton for batch in batches]

    def add(self, salt: bytes | None, tokens: Sequence[int]) -> None:
        """Keep an answer, and drop older ones if there are too many."""
        if salt is None or not tokens or not self._most_answers or len(tokens) > self._most_tokens:
            return
        batches = self._tenants.setdefault(salt, deque())
        self._tenants.move_to_end(salt)
        if not batches or 2 * batches[-1].answers >= self._most_answers or 2 * batches[-1].tokens >= self._most_tokens:
            batches.append(_Batch(SuffixAutomaton(self._depth)))
        batch = batches[-1]
        batch.automaton.begin_text()
        batch.automaton.extend(tokens)
        self._count(batch, 1, len(tokens))
        while self.answers > self._most_answers or self.tokens > self._most_tokens:
            self._drop_oldest()

    def _count(self, batch: _Batch, answers: int, tokens: int) -> None:
        batch.answers += answers
        batch.tokens += tokens
        self.answers += answers
        self.tokens += tokens

    def _drop_oldest(self) -> None:
        salt, batches = next(iter(self._tenants.items()))
        batch = batches.popleft()
        self._count(batch, -batch.answers, -batch.tokens)
        if not batches:
            del self._tenants[salt]
