"""Candidates for the next token from a drafter's own logits: one for a chain, or several for a tree."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from llmc.errors import RequestError
from llmc.program.step_outputs import CANDIDATES
from llmc.runtime.executors.executor import Executor
from llmc.runtime.loop.step import Step
from llmc.runtime.requests.boundary import attempts
from llmc.runtime.requests.request import SampledRequest
from llmc.runtime.speculation.acceptance import Probabilities
from llmc.runtime.speculation.best_tree import Candidate
from llmc.runtime.speculation.draft import MOST_NODES
from llmc.runtime.speculation.draft_tokens import Likely, choose_drafts, likely_tokens
from llmc.runtime.speculation.rank_truth import RankTruth

# A request, and the drafts that follow its tokens.
Place = tuple[SampledRequest, list[int]]


class Following(NamedTuple):
    """Candidates, the most likely first. drawn_from: the distribution of a single drawn one, if requested."""

    candidates: Sequence[Candidate]
    drawn_from: Probabilities | None = None


class Candidates(Protocol):
    """Chooses the candidates of a draft's next tokens. width: number of tokens of a request that are continued at
    once."""

    @property
    def width(self) -> int:
        """1 for chains."""

    def after(self, executor: Executor, step: Step, places: Sequence[Place]) -> Sequence[Following | RequestError]:
        """Run the step; its first rows of logits belong to the places."""

    def forget(self, request: SampledRequest) -> None:
        """Drop the state of a request that has ended."""


class ChainCandidates:
    """One candidate each, drawn as the request draws its own tokens. says_from_what: whether it comes with its
    distribution."""

    width = 1

    def __init__(self, *, says_from_what: bool) -> None:
        self._says_from_what = says_from_what

    def after(self, executor: Executor, step: Step, places: Sequence[Place]) -> Sequence[Following | RequestError]:
        guesses = [(request.sampler, drafts) for request, drafts in places]
        drawn = choose_drafts(executor, step, guesses, says_from_what=self._says_from_what)
        return [
            draft if isinstance(draft, RequestError) else Following([Candidate(draft.token, 1.0)], draft.origin)
            for draft in drawn
        ]

    def forget(self, request: SampledRequest) -> None:
        """Drop nothing, because nothing is kept."""


class TreeCandidates:
    """Several candidates each. Their probabilities are the draft's, corrected by how often candidates of a depth and
    rank were accepted."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._truth = RankTruth(MOST_NODES, CANDIDATES)
        # By request, and by how many tokens it had then: what was said to follow these drafts.
        self._said: dict[SampledRequest, tuple[int, dict[tuple[int, ...], Likely]]] = {}

    def after(self, executor: Executor, step: Step, places: Sequence[Place]) -> Sequence[Following | RequestError]:
        guesses = [(request.sampler, drafts) for request, drafts in places]
        likely = likely_tokens(executor, step, guesses, CANDIDATES)
        return attempts(self._following, [(*place, answer) for place, answer in zip(places, likely, strict=True)])

    def forget(self, request: SampledRequest) -> None:
        """Drop nothing: only how often candidates are right is kept."""
        self._said.pop(request, None)

    def _following(self, request: SampledRequest, drafts: list[int], answer: Likely | RequestError) -> Following:
        if isinstance(answer, RequestError):
            raise answer
        if not drafts:
            self._learn(request)
            self._said[request] = len(request.tokens), {}
        self._said[request][1][tuple(drafts)] = answer
        shares = self._truth.likely(answer.shares[None], len(drafts))[0].tolist()
        candidates = [Candidate(*pair) for pair in zip(answer.tokens.tolist(), shares, strict=True)]
        return Following(sorted(candidates, key=lambda candidate: -candidate.probability))

    def _learn(self, request: SampledRequest) -> None:
        """Record the outcome of the last candidates whose predecessors were accepted."""
        length, known = self._said.get(request, (0, {}))
        came = tuple(request.tokens[length:])
        for depth, token in enumerate(came):
            likely = known.get(came[:depth])
            if likely is None:
                break
            self._truth.note(likely.shares[None], (likely.tokens == token)[None], depth)
