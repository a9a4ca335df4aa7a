"""Medusa: heads of the engine predict, in each row of logits, the tokens after the next one (Cai et al. 2024).

Head i of the row that gave a request its last token predicts the token i places after that one. A candidate's
probability is that of its head, corrected by how often candidates of that head and rank were accepted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.program.step_outputs import DRAFT_IDS, DRAFT_LOGPROBS
from llmc.runtime.requests.boundary import attempts, errors
from llmc.runtime.requests.request import Request, SampledRequest
from llmc.runtime.speculation.best_tree import Candidate, best_tree
from llmc.runtime.speculation.computed_step import ComputedStep
from llmc.runtime.speculation.draft import NO_DRAFT, Draft
from llmc.runtime.speculation.drafter import EachDrafter
from llmc.runtime.speculation.rank_truth import RankTruth


@dataclass(frozen=True)
class _HeadRows:
    """The heads' candidates when a request had `tokens` tokens. ids, probabilities: [heads, candidates]."""

    length: int
    ids: npt.NDArray[np.int32]
    probabilities: npt.NDArray[np.float64]


class MedusaDrafter(EachDrafter):
    """Trees of the candidates of the engine's own heads."""

    def __init__(self) -> None:
        self._said: dict[SampledRequest, _HeadRows] = {}
        self._truth: RankTruth | None = None

    def sides(self, pays: bool, has_prompts: bool) -> tuple[str, ...]:
        """The heads' candidates, while drafts pay."""
        return (DRAFT_IDS, DRAFT_LOGPROBS) if pays else ()

    def observe(self, step: ComputedStep) -> Mapping[Request, RequestError]:
        """Keep the heads' candidates at each request's last token."""
        if not step.sides:
            return {}
        ids, logprobs = step.side_output(DRAFT_IDS), step.side_output(DRAFT_LOGPROBS)
        self._truth = truth = self._truth or RankTruth(*ids.shape[1:])

        def observe(request: SampledRequest, row: int) -> None:
            before = self._said.get(request)
            if before is not None:
                _learn(truth, before, request.tokens)
            probabilities = np.exp(logprobs[row].astype(np.float64))
            self._said[request] = _HeadRows(len(request.tokens), ids[row].astype(np.int32), probabilities)

        rows = [
            (chunk.request, row)
            for chunk in step.chunks()
            if (row := chunk.last_logit_row) is not None
            and not chunk.request.finished
            and isinstance(chunk.request, SampledRequest)
        ]
        return errors((request for request, _ in rows), attempts(observe, rows))

    def forget(self, request: SampledRequest) -> None:
        """Drop the request; only the statistics of the heads are kept."""
        self._said.pop(request, None)

    def draft(self, request: SampledRequest, most: int) -> Draft:
        """The draft of a request whose heads were computed at its last token."""
        answer = self._said.get(request)
        if answer is None or self._truth is None or answer.length != len(request.tokens):
            return NO_DRAFT
        likely = self._truth.likely(answer.probabilities)
        order = np.argsort(-likely, axis=1, kind="stable")
        ids, shares = (np.take_along_axis(array, order, 1).tolist() for array in (answer.ids, likely))
        by_depth = zip(ids, shares, strict=True)
        return best_tree([[Candidate(*pair) for pair in zip(*head, strict=True)] for head in by_depth], most)


def _learn(truth: RankTruth, answer: _HeadRows, tokens: Sequence[int]) -> None:
    """Record the outcome of candidates, mostly of those whose predecessors were accepted, as drafts require."""
    known = np.asarray(tokens[answer.length : answer.length + len(answer.ids)], np.int32)
    count = len(known)
    truth.note(answer.probabilities[:count], answer.ids[:count] == known[:, None])
