"""Metrics of finished requests, as Prometheus histograms with vLLM's names under `llmc:`, and the latest requests."""

from collections import deque
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.runtime.requests.request_output import RequestOutput

# The path label of answers before routing: a wrong key, a large body, an unknown path.
UNROUTED = "unrouted"

_REMEMBERED = 240
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1.0, 2.5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class RequestMetrics:
    """Histograms of one server. Times are measured in the engine, so they leave out HTTP.

    latest: the latest finished requests, oldest first, for the live page.
    """

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self.latest: deque[Finished] = deque(maxlen=_REMEMBERED)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"llmc:{name}", text, ["model_name"], buckets=buckets, registry=registry)
            return made.labels(model)

        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time of a request's tokens after the first.", _TOKEN_SECONDS
        )
        self._between = histogram("inter_token_latency_seconds", "Between one output and the next.", _TOKEN_SECONDS)
        self._end_to_end = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first step.", _SECONDS)
        self._prefill = histogram("request_prefill_time_seconds", "From the first step to the first token.", _SECONDS)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last.", _SECONDS)
        self._prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output_tokens = histogram("request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self._choices = histogram("request_params_n", "The number of requested choices.", (1, 2, 5, 10, 20))
        self._answers = Counter(
            "llmc:http_requests", "HTTP answers.", ["model_name", "path", "status"], registry=registry
        )
        self._model = model

    def gap(self, seconds: float) -> None:
        """The time between two outputs of a request."""
        self._between.observe(seconds)

    def answered(self, path: str, status: int) -> None:
        """Record an HTTP answer. path: the route's template, not the client's path, to keep the number of labels
        small."""
        self._answers.labels(self._model, path, str(status)).inc()

    def finished(self, output: RequestOutput, choices: int) -> None:
        """A request's last output. choices: The number of requested choices."""
        times, usage = output.times, output.usage
        self._prompt_tokens.observe(usage.prompt_tokens)
        self._output_tokens.observe(usage.completion_tokens)
        self._choices.observe(choices)
        if times.started is not None:
            self._queue.observe(max(0.0, times.started - times.arrived))
        if times.finished is None:
            return
        first, per_token, total = None, None, times.finished - times.arrived
        self._end_to_end.observe(total)
        if times.first_token is not None:
            first, decode = times.first_token - times.arrived, times.finished - times.first_token
            self._first_token.observe(first)
            if times.started is not None:
                self._prefill.observe(max(0.0, times.first_token - times.started))
            self._decode.observe(decode)
            if usage.completion_tokens > choices:
                self._per_token.observe(decode * choices / (usage.completion_tokens - choices))
            if usage.completion_tokens > 1:
                per_token = decode / (usage.completion_tokens - 1)
        counts = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        self.latest.append(Finished(times.finished, first, per_token, total, *counts))


@dataclass(frozen=True)
class Finished:
    """A finished request: seconds to the first token, per later token and to the end; None if it had none."""

    at: float
    first_token: float | None
    per_token: float | None
    total: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class CountAnswers:
    """ASGI middleware that tells RequestMetrics of each answer, refusals by other middleware included."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(getattr(scope.get("route"), "path", UNROUTED), message["status"])
            await send(message)

        await self._app(scope, receive, counted)
