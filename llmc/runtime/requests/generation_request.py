"""A client's request to the engine: a prompt, its sampling parameters, and its priority."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from llmc.runtime.adapters.placed_adapter import PlacedAdapter
from llmc.runtime.sampling.sampling_params import SamplingParams


class Priority(Enum):
    """Which requests start first. A FREE one that waits long enough is treated as PREMIUM, so that none starves."""

    PREMIUM = "premium"
    FREE = "free"


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt and its parameters.

    prompt_token_ids: at least one id, all in the vocabulary. request_id: unique among the requests in flight.
    deadline_seconds: counted from submission; when it has passed, the request ends with finish_reason "deadline" and
    what it has until then. tenant: requests share cached prefixes only with requests of the same tenant; None is a
    tenant of its own. streams: outputs are wanted as they come; otherwise there is one, when all is done, which costs
    less. adapter: one of the engine's (Engine.adapters); None for the model as it is. wants_row: the answer is what a
    model with a head gives for the text (Engine.embed), and nothing is generated; params are of no account.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    request_id: str
    priority: Priority = Priority.FREE
    deadline_seconds: float | None = None
    tenant: str | None = None
    streams: bool = True
    adapter: PlacedAdapter | None = None
    wants_row: bool = False

    def __repr__(self) -> str:
        return f"GenerationRequest({self.request_id!r}, prompt of {len(self.prompt_token_ids)} tokens, {self.params!r})"
