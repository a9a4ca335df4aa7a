"""A client's request to the engine: a prompt, its sampling parameters, and its priority."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from llmc.runtime.adapters.placed_adapter import PlacedAdapter
from llmc.runtime.sampling.sampling_params import SamplingParams


class Priority(Enum):
    """Which requests start first. A FREE request that waits long enough is treated as PREMIUM, so that it always
    starts."""

    PREMIUM = "premium"
    FREE = "free"


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt and its parameters.

    Attributes:
        prompt_token_ids: At least one id, all in the vocabulary.
        params: How to continue the prompt.
        request_id: A name that is unique among the requests in flight.
        priority: Which requests start first.
        deadline_seconds: Time from submission until the request ends with finish_reason "deadline" and its tokens.
        tenant: Requests share cached prefixes only within a tenant; None is a separate tenant.
        streams: Whether outputs are returned as they come. Otherwise there is one output at the end, which is cheaper.
        adapter: One of the engine's (Engine.adapters); None uses the plain model.
        wants_row: Whether the result is the row of a model with a head (Engine.embed). Nothing is generated then, and
            params are ignored.
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
