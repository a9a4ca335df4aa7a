"""One streamed completion over HTTP, with the time of every piece."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from llmc.bench.draft_counts import DraftCounts, read_counts
from llmc.bench.prompts import LoadRequest
from llmc.bench.request_record import RequestRecord
from llmc.errors import LlmcError, OptionError


@dataclass(frozen=True)
class Server:
    """The server to measure. base_url: URL without /v1. model: The model's name there. extra: Further fields of every
    request body."""

    base_url: str
    model: str
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def session(self) -> aiohttp.ClientSession:
        """A client session with unlimited connections. A request times out if the server sends nothing for ten
        minutes."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
        return aiohttp.ClientSession(headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def complete(session: aiohttp.ClientSession, server: Server, request: LoadRequest) -> RequestRecord:
    """Send the request and read its stream. Failures are in the record, not raised."""
    body = {
        "model": server.model,
        "prompt": list(request.prompt),
        "max_tokens": request.output_len,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **server.extra,
    }
    record = RequestRecord(time.perf_counter(), len(request.prompt))
    try:
        async with session.post(f"{server.base_url}/v1/completions", json=body) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                await _read(response, record)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.ended = record.pieces[-1] if record.pieces else time.perf_counter()
    if record.error is None and not record.pieces:
        record.error = "the stream ended without any output"
    return record


async def _read(response: aiohttp.ClientResponse, record: RequestRecord) -> None:
    async for line in response.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        now = time.perf_counter()
        event = json.loads(line[6:])
        if "error" in event:
            record.error = str(event["error"].get("message"))
            return
        if event.get("choices"):
            record.pieces.append(now)
        if event.get("usage"):
            usage = event["usage"]
            record.output_tokens = usage["completion_tokens"]
            record.prompt_tokens = usage["prompt_tokens"]
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


async def find_server(base_url: str, model: str | None, api_key: str | None) -> tuple[Server, int | None]:
    """The server with its first model's name unless one is given, and that model's max_model_len if it says."""
    server = Server(base_url.rstrip("/").removesuffix("/v1"), model or "", api_key)
    try:
        async with server.session() as session, session.get(f"{server.base_url}/v1/models") as response:
            if response.status != 200:
                raise LlmcError(
                    f"{server.base_url}/v1/models answers {response.status}",
                    at=base_url,
                    fix="give --base-url of an OpenAI-compatible server, and --api-key if it needs one",
                )
            models = (await response.json())["data"]
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
        raise OptionError(
            f"no server answers: {error}", at=base_url, fix="start one: llmc serve ENGINE, then give its --base-url"
        ) from None
    served = next((m for m in models if model in (None, m["id"])), models[0] if models else {})
    return Server(server.base_url, model or served.get("id", ""), api_key), served.get("max_model_len")


async def fetch_counts(server: Server, before: DraftCounts | None = None) -> DraftCounts | None:
    """Since `before`, or since the server started; None of a server that does not draft, or has no /metrics."""
    try:
        async with server.session() as session, session.get(f"{server.base_url}/metrics") as response:
            counts = read_counts(await response.text()) if response.status == 200 else None
            return counts if counts is None or before is None else counts.since(before)
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
