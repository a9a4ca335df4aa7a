"""Passes requests on to replicas and their answers back, and merges what the replicas report of themselves."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import aiohttp
from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from llmc.runtime.server.api_key import HOLDER_HEADER, holder_of
from llmc.runtime.server.connection import ClientLeft, while_connected
from llmc.runtime.server.errors import ApiError, end_stream_with, stream_end, typed_error_event
from llmc.runtime.server.lifecycle import NOT_BEGUN_HEADER, Lifecycle
from llmc.runtime.server.live import SUMMED_STATS
from llmc.runtime.server.replicas.replica import Replica
from llmc.runtime.server.replicas.routing import Candidate, Router, previous_response_of, prompt_of
from llmc.runtime.server.request_id import REQUEST_ID_HEADER, request_id
from llmc.runtime.server.responses.store import replica_of

_log = logging.getLogger("llmc.server")
_EVENT_END = b"\n\n"
_RESPONSES = "/v1/responses"
_PASSED_ON = ("/v1/completions", "/v1/chat/completions", _RESPONSES, "/tokenize", "/detokenize")
_RESPONSE = f"{_RESPONSES}/{{response_id}}"
_ASKED_OF_ANY = ("/v1/models", "/version")
# Headers of the connection, not of the message (RFC 9110, section 7.6.1).
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host"})
# Kept from replicas: the key, and what only the router may say.
_DROPPED = _HOP_BY_HOP | {"authorization", "content-length", HOLDER_HEADER, REQUEST_ID_HEADER}


def proxy_routes(replicas: Sequence[Replica], router: Router, lifecycle: Lifecycle) -> APIRouter:
    routes = APIRouter()

    async def passed_on(request: Request) -> Response:
        return PassedOn(replicas, router, request, await request.body())

    for path in _PASSED_ON:
        routes.add_api_route(path, passed_on, methods=["POST"], response_model=None)
    for path in (*_ASKED_OF_ANY, "/v1/models/{name:path}"):
        routes.add_api_route(path, passed_on, methods=["GET"], response_model=None)

    # The routes that go to the replica with the resource.
    routes.add_api_route(_RESPONSE, passed_on, methods=["GET", "DELETE"], response_model=None)
    routes.add_api_route(f"{_RESPONSE}/input_items", passed_on, methods=["GET"], response_model=None)
    routes.add_api_route(f"{_RESPONSE}/cancel", passed_on, methods=["POST"], response_model=None)

    @routes.get("/health", response_model=None)
    async def health() -> Response:
        if lifecycle.draining:
            raise ApiError(503, "the server is shutting down")
        if not any(replica.healthy for replica in replicas):
            raise ApiError(503, "no replica is healthy")
        healthy = sum(replica.healthy for replica in replicas)
        status = "ok" if healthy == len(replicas) else "degraded"
        return JSONResponse({"status": status, "healthy_replicas": healthy, "replicas": len(replicas)})

    @routes.get("/metrics", response_model=None)
    async def metrics() -> Response:
        texts = await _ask_all(replicas, "/metrics")
        registry = CollectorRegistry()
        registry.register(MergedMetrics({r.index: text for r, text in texts}, replicas))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/live", response_model=None)
    async def live() -> Response:
        views = await _ask_all(replicas, "/live", as_json=True)
        if not views:
            raise ApiError(503, "no replica is healthy")
        return JSONResponse(merged_view(views, replicas), headers={"Cache-Control": "no-store"})

    return routes


class PassedOn(Response):
    """A request at a replica and its answer on the way back; ends there when the client leaves here.

    A replica that cannot be reached, or refuses everything, is left out and the next one asked; once an answer has
    begun that is too late. A request whose replica ends meanwhile is sent on once: it may be the request that crashes
    replicas.
    """

    def __init__(self, replicas: Sequence[Replica], router: Router, request: Request, body: bytes) -> None:
        super().__init__()
        self._replicas = replicas
        self._router = router
        self._request = request
        self._body = body
        self._events = 0
        self._losses = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == _RESPONSES:
            end_stream_with(scope, lambda error: typed_error_event(error, self._events))
        with suppress(ClientLeft):
            await while_connected(receive, self._pass_on(scope, receive, send))

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        prompt = prompt_of(self._body) if self._request.method == "POST" else None
        owner = replica_of(self._request.path_params.get("response_id") or previous_response_of(self._body) or "")
        tried: set[int] = set()
        while True:
            left = [r for r in self._replicas if r.healthy and r.index not in tried]
            if not left or self._losses > 1:
                answer = ApiError(503, "no replica is healthy; try again later", retry_after=1).response()
                await answer(scope, receive, send)
                return
            # Another replica does not have the response.
            left = [r for r in left if r.index == owner] or left
            chosen = self._router.choose([Candidate(r.index, r.in_flight) for r in left], prompt)
            tried.add(chosen)
            replica = next(r for r in left if r.index == chosen)
            replica.in_flight += 1
            replica.routed += 1
            try:
                if await self._ask(replica, send):
                    return
            finally:
                replica.in_flight -= 1

    async def _ask(self, replica: Replica, send: Send) -> bool:
        """Whether the replica answered; False if it could not be reached, refused the request before anything was done
        for it, or ended before an answer was begun here."""
        begun = False
        headers = {k: v for k, v in self._request.headers.items() if k not in _DROPPED}
        holder = holder_of(self._request)
        if holder is not None:
            headers[HOLDER_HEADER] = holder
        headers[REQUEST_ID_HEADER] = request_id(self._request.scope)
        url = self._request.url.path + (f"?{self._request.url.query}" if self._request.url.query else "")
        try:
            async with replica.session.request(
                self._request.method, url, data=self._body or None, headers=headers
            ) as answer:
                if answer.status == 503 and NOT_BEGUN_HEADER in answer.headers:
                    replica.lose()
                    return False
                kept = [
                    (k.lower().encode(), v.encode()) for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP
                ]
                start = {"type": "http.response.start", "status": answer.status, "headers": kept}
                if answer.content_type != "text/event-stream":
                    body = await answer.read()
                    await send(start)
                    await send({"type": "http.response.body", "body": body, "more_body": False})
                    return True
                await send(start)
                begun = True
                async for events in _whole_events(answer.content):
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                    self._events += events.count(_EVENT_END)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return True
        except (aiohttp.ClientError, OSError) as error:
            replica.lose()
            self._losses += not isinstance(error, aiohttp.ClientConnectorError)
            if begun:
                name = request_id(self._request.scope)
                _log.warning("request %s: replica %d has ended in its answer: %r", name, replica.index, error)
                lost = ApiError(503, "the replica that was answering has ended; send the request again")
                end = stream_end(self._request.scope, lost)
                await send({"type": "http.response.body", "body": end, "more_body": False})
            return begun


async def _whole_events(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yield whole events, so that an error can follow at any moment."""
    held = b""
    async for data in content.iter_any():
        held += data
        end = held.rfind(_EVENT_END) + len(_EVENT_END)
        if end >= len(_EVENT_END):
            yield held[:end]
            held = held[end:]


async def _ask_all(replicas: Sequence[Replica], path: str, as_json: bool = False) -> list[tuple[Replica, Any]]:
    """The answers of the replicas that give one."""

    async def ask(replica: Replica) -> tuple[Replica, Any] | None:
        try:
            async with replica.session.get(path, timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return replica, await (answer.json() if as_json else answer.text())
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    answers = await asyncio.gather(*(ask(replica) for replica in replicas if replica.healthy))
    return [answer for answer in answers if answer is not None]


class MergedMetrics(Collector):
    """The replicas' metrics with the label `replica`, and the router's own."""

    def __init__(self, texts: dict[int, str], replicas: Sequence[Replica]) -> None:
        self._texts = texts
        self._replicas = replicas

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for index, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.add_sample(sample.name, {**sample.labels, "replica": str(index)}, sample.value)
        own: tuple[tuple[str, str, Callable[[Replica], float]], ...] = (
            ("llmc:replica_up", "Whether the replica is healthy.", lambda r: float(r.healthy)),
            ("llmc:replica_requests_in_flight", "Requests that the replica has now.", lambda r: float(r.in_flight)),
            ("llmc:replica_restarts", "How often the replica was started again.", lambda r: float(r.restarts)),
        )
        for name, text, of in own:
            gauge = Metric(name, text, "gauge")
            for replica in self._replicas:
                gauge.add_sample(name, {"replica": str(replica.index)}, of(replica))
            families[name] = gauge
        return families.values()


def merged_view(views: Sequence[tuple[Replica, dict[str, Any]]], replicas: Sequence[Replica]) -> dict[str, Any]:
    """The replicas' live views as one: sums, all requests, and a line for each replica."""
    merged: dict[str, Any] = {**views[0][1], "healthy": all(replica.healthy for replica in replicas)}
    for name in (*SUMMED_STATS, "requests_not_shown"):
        merged[name] = sum(view[name] for _, view in views)
    for name in ("blocks", "prefix_cache", "rows", "snapshots", "offload", "drafts", "finished"):
        keys = {key: None for _, view in views for key in view[name]}
        merged[name] = {key: sum(view[name].get(key, 0) for _, view in views) for key in keys}
    for name in ("requests", "latest", "step_seconds", "step_tokens"):
        merged[name] = [item for _, view in views for item in view[name]]
    by_index = {replica.index: view for replica, view in views}
    merged["replicas"] = [
        {
            "index": r.index,
            "healthy": r.healthy,
            "running": by_index.get(r.index, {}).get("running", 0),
            "waiting": by_index.get(r.index, {}).get("waiting", 0),
            "routed": r.routed,
            "restarts": r.restarts,
        }
        for r in replicas
    ]
    return merged
