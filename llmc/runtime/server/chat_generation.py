"""The engine's request for a chat request."""

from collections.abc import Sequence

from llmc.runtime.requests.generation_request import GenerationRequest
from llmc.runtime.server.answer_plan import AnswerPlan
from llmc.runtime.server.errors import bad_request
from llmc.runtime.server.sampling import engine_request, sampling_params
from llmc.runtime.server.schemas.chat import ChatRequest
from llmc.runtime.server.served_model import ServedModel


def asked_tokens(body: ChatRequest) -> int | None:
    """The requested number of output tokens, by the newer of the two field names."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def generation_request(
    model: ServedModel,
    body: ChatRequest,
    ids: Sequence[int],
    plan: AnswerPlan,
    identity: str,
    tenant: str | None,
    limit_field: str = "max_tokens",
) -> GenerationRequest:
    """Return the engine's request for a chat request.

    tenant: cached prefixes are shared within it. limit_field: the field of the body with the token limit. Raises
    ApiError for values that contradict each other.
    """
    max_tokens = asked_tokens(body)
    if max_tokens == 0:
        raise bad_request("max_tokens is at least 1", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
    params = sampling_params(
        body,
        model.defaults,
        max_tokens=model.output_limit(max_tokens, len(ids), limit_field),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=plan.grammar,
        skip_special_tokens=False if plan.keeps_special else None,
        seed=model.next_seed(),
    )
    return engine_request(body, ids, params, identity, tenant, model.adapter(body.model))
