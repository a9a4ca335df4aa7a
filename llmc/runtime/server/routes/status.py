"""GET /v1/models, /health, /version, /metrics and /live: what is served, and how it does."""

import time
from importlib import metadata
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import JSONResponse, Response

from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.live import live_view
from llmc.runtime.server.served_model import ServedModel


def status_routes(model: ServedModel, registry: CollectorRegistry) -> APIRouter:
    router, started = APIRouter(), time.monotonic()

    @router.get("/v1/models", response_model=None)
    async def models() -> Response:
        names = (*model.names, *model.engine.engine.adapters.names())
        return JSONResponse({"object": "list", "data": [card(model, name) for name in names]})

    @router.get("/v1/models/{name:path}", response_model=None)
    async def one_model(name: str) -> Response:
        model.check_name(name)
        return JSONResponse(card(model, name))

    @router.get("/health", response_model=None)
    async def health() -> Response:
        if model.engine.failure is not None:
            raise ApiError(503, "a step of the engine has failed, and the server ends; its log says why")
        if model.lifecycle.draining:
            raise ApiError(503, "the server is shutting down")
        if not model.engine.takes_requests:
            raise ApiError(503, "the engine is being reopened after a failed step", retry_after=1)
        if not model.engine.is_healthy(model.stall_seconds):
            raise ApiError(503, "the engine is stuck in a step; restart the server")
        return JSONResponse({"status": "ok"})

    @router.get("/version", response_model=None)
    async def version() -> Response:
        return JSONResponse({"version": metadata.version("llmc-compiler")})

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/live", response_model=None)
    async def live() -> Response:
        return JSONResponse(live_view(model, started), headers={"Cache-Control": "no-store"})

    return router


def card(model: ServedModel, name: str) -> dict[str, Any]:
    """A model, or one with an adapter, as OpenAI lists it, with vLLM's max_model_len and parent."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "llmc",
        "root": str(model.engine.engine.info.name),
        "parent": None if name in model.names else model.name,
        "max_model_len": model.max_model_len,
    }
