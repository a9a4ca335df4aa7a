"""A request in flight, as the loop's thread of the asyncio engine knows it, and what its client is told."""

from dataclasses import dataclass

from llmc.errors import UnavailableError
from llmc.runtime.engine_stats import RequestView
from llmc.runtime.requests.generation import Generation
from llmc.runtime.requests.generation_job import GenerationJob
from llmc.runtime.requests.generation_request import GenerationRequest
from llmc.runtime.requests.request import Request
from llmc.runtime.requests.request_output import RequestTimes
from llmc.runtime.text.output_stream import ChoiceNews, News, OutputStream


@dataclass(eq=False)
class Client:
    """told: how many tokens of each choice the client has heard of; ended: of which choices the end."""

    request: GenerationRequest
    job: GenerationJob
    stream: OutputStream
    arrived: float
    told: list[int]
    ended: list[bool]
    streams: bool
    first_token: float | None = None
    told_prompt: bool = False
    times: RequestTimes | None = None


def choice_news(client: Client, choice: Request) -> ChoiceNews | None:
    """What the choice has gained since its client was told; None for nothing."""
    assert isinstance(choice, Generation)
    index = choice.index
    told, length = client.told[index], len(choice.tokens)
    if client.ended[index] or (told == length and not choice.finished):
        return None
    client.told[index], client.ended[index] = length, choice.finished
    logprobs = None
    if choice.logprobs is not None:
        logprobs = tuple(choice.logprobs[told - choice.prompt_tokens :])
    return ChoiceNews(
        index,
        tuple(choice.tokens[told:]),
        None if choice.text is None else choice.text.read(),
        logprobs,
        choice.finish_reason,
        choice.stop_reason,
        choice.cumulative_logprob if choice.finished else None,
    )


def view(client: Client, now: float) -> RequestView:
    """For who looks at what is in flight."""
    sequences, prompt_tokens = client.job.sequences, len(client.request.prompt_token_ids)
    blocks = sum(len(sequence.standing.blocks) for sequence in sequences)
    return RequestView(
        request_id=client.request.request_id,
        priority=client.request.priority,
        state="running" if blocks else "waiting",
        seconds=now - client.arrived,
        prompt_tokens=prompt_tokens,
        computed_tokens=max((sequence.computed for sequence in sequences), default=0),
        output_tokens=sum(max(0, len(s.tokens) - prompt_tokens) for s in sequences),
        blocks=blocks,
    )


def deliver(news: list[tuple[OutputStream, News]]) -> None:
    """Put what each stream is told into it; in its own event loop."""
    for stream, each in news:
        stream.put(each)


def unavailable() -> UnavailableError:
    """What a request gets that comes too late."""
    return UnavailableError("the engine takes no more requests", fix="send it to another replica, or try again later")


def loop_died() -> UnavailableError:
    """What a request gets that nobody can go on with."""
    return UnavailableError("the engine's loop has died", fix="restart the server, and read its log")
