"""A request in flight in the loop thread of the asyncio engine, and the outputs sent to its client."""

from dataclasses import dataclass, field
from typing import NamedTuple

from llmc.errors import EngineFailureError, RequestError, UnavailableError
from llmc.runtime.engine_stats import RequestView
from llmc.runtime.requests.generation import Generation
from llmc.runtime.requests.generation_job import GenerationJob, SampledJob
from llmc.runtime.requests.generation_request import GenerationRequest
from llmc.runtime.requests.request import Origin, Request
from llmc.runtime.requests.request_output import FinishReason, RequestTimes
from llmc.runtime.text.output_stream import ChoiceNews, News, OutputStream, news_of_results


@dataclass(eq=False)
class Client:
    """A request of AsyncEngine in flight. first: the sequence that the job begins with. told: number of tokens of each
    choice that were sent to the client. ended: choices whose end was sent. counted: tokens of each sequence in the
    engine's counter; for beams, of the longest."""

    request: GenerationRequest
    job: GenerationJob
    first: Request
    stream: OutputStream
    arrived: float
    told: list[int]
    ended: list[bool]
    streams: bool
    first_token: float | None = None
    told_prompt: bool = False
    times: RequestTimes | None = None
    counted: list[int] = field(default_factory=list)

    @property
    def origin(self) -> Origin:
        """The origin shared by all its sequences."""
        return self.first.origin

    def news(
        self,
        choices: tuple[ChoiceNews, ...] = (),
        *,
        finished: float | None = None,
        error: RequestError | None = None,
    ) -> News:
        """Make the next message of a stream. finished: the time at which the request ended, for the last message."""
        first, times = self.first, self.times
        if times is None or finished is not None:
            times = self.times = RequestTimes(self.arrived, first.standing.started, self.first_token, finished)
        prompt_logprobs = None if self.told_prompt or error else self.job.prompt_logprobs
        self.told_prompt = True
        return News(choices, first.standing.cached_tokens, times, finished is not None, error, prompt_logprobs)


class NewTokens(NamedTuple):
    """The result of a step for a client: the number of new tokens, and the output to send now, if any."""

    tokens: int
    news: News | None = None
    is_last: bool = False


class LastNews(NamedTuple):
    """The end of a request, with the number of tokens that were not counted before."""

    tokens: int
    reason: FinishReason
    news: News


def news_of(client: Client, request: Request) -> NewTokens:
    """The news for a client after a step in which one of its sequences took part."""
    job = client.job
    if request.finished and job.finished:
        return NewTokens(0, is_last=True)
    # The first choice starts the others: all of them have news then.
    own = job.choices if isinstance(job, SampledJob) and not client.told_prompt else (request,)
    tokens = count_tokens(client, own)
    if not client.streams:
        client.told_prompt = True
        return NewTokens(tokens)
    choices = tuple(news for choice in own if (news := choice_news(client, choice)) is not None)
    return NewTokens(tokens, client.news(choices) if choices else None)


def last_news(client: Client, now: float) -> LastNews:
    """The final output of a request that has ended. Raises its error."""
    job = client.job
    if job.error is not None:
        raise job.error
    if isinstance(job, SampledJob) and client.streams:
        tokens = count_tokens(client, job.choices)
        choices = tuple(last for choice in job.choices if (last := choice_news(client, choice)) is not None)
        return LastNews(tokens, choices[-1].finish_reason or "stop", client.news(choices, finished=now))
    results = job.results()
    # The sequences that were counted need not be those that the answer has.
    tokens = max(0, sum(len(result.token_ids) for result in results) - sum(client.counted))
    times = RequestTimes(client.arrived, job.first.standing.started, client.first_token, now)
    news = news_of_results(results, job.prompt_logprobs, job.first.standing.cached_tokens, times)
    return LastNews(tokens, results[0].finish_reason, news)


def count_tokens(client: Client, sequences: tuple[Request, ...]) -> int:
    """Number of new tokens of the sequences since the last count; only sequences that the answer will have are
    counted."""
    job, prompt_tokens, gained = client.job, len(client.request.prompt_token_ids), 0
    for sequence in sequences:
        index = sequence.index if isinstance(sequence, Generation) else 0
        if isinstance(job, SampledJob) and index >= job.given:
            continue
        count = len(sequence.tokens) - prompt_tokens
        if count > client.counted[index]:
            gained += count - client.counted[index]
            client.counted[index] = count
    return gained


def choice_news(client: Client, choice: Request) -> ChoiceNews | None:
    """The new tokens of a choice since the last output to its client; None if there are none."""
    assert isinstance(choice, Generation)
    index = choice.index
    sent, length = client.told[index], len(choice.tokens)
    if client.ended[index] or (sent == length and not choice.finished):
        return None
    client.told[index], client.ended[index] = length, choice.finished
    logprobs = None
    if choice.logprobs is not None:
        logprobs = tuple(choice.logprobs[sent - choice.prompt_tokens :])
    return ChoiceNews(
        index,
        tuple(choice.tokens[sent:]),
        None if choice.text is None else choice.text.read(),
        logprobs,
        choice.finish_reason,
        choice.stop_reason,
        choice.cumulative_logprob if choice.finished else None,
    )


def view(client: Client, now: float) -> RequestView:
    """The view of a client for observers of the requests in flight."""
    sequences, prompt_tokens = client.job.sequences, len(client.request.prompt_token_ids)
    blocks = sum(len(sequence.standing.blocks) for sequence in sequences)
    return RequestView(
        request_id=client.request.request_id,
        priority=client.request.priority,
        state="running" if blocks else "waiting",
        seconds=now - client.arrived,
        prompt_tokens=prompt_tokens,
        computed_tokens=max((sequence.own_computed for sequence in sequences), default=0),
        output_tokens=sum(max(0, len(s.tokens) - prompt_tokens) for s in sequences),
        blocks=blocks,
    )


def deliver(news: list[tuple[OutputStream, News]]) -> None:
    """Put the news into each stream, in its own event loop."""
    for stream, item in news:
        stream.put(item)


def unavailable() -> UnavailableError:
    """The error of a request that arrives after the engine has closed."""
    return UnavailableError("the engine accepts no more requests", fix="send it to another replica, or try again later")


def engine_died(failure: EngineFailureError) -> UnavailableError:
    """The error of a request in flight when the engine has died."""
    error = UnavailableError(
        "a step of the engine has failed, and the engine has stopped", fix="see the log, and restart it"
    )
    error.__cause__ = failure
    return error


def step_failed(failure: EngineFailureError) -> UnavailableError:
    """The error of a request in flight when a step failed and the engine continues."""
    error = UnavailableError("a step of the engine has failed, which ends the request", fix="try again")
    error.__cause__ = failure
    return error
