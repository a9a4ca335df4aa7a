"""POST /v1/load_lora_adapter and POST /v1/unload_lora_adapter."""

import asyncio
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.schemas.adapters import LoadAdapterRequest, UnloadAdapterRequest
from llmc.runtime.server.served_model import ServedModel


def adapter_routes(model: ServedModel) -> APIRouter:
    """The routes, for that model. They answer in plain text, as vLLM's do."""
    router = APIRouter(route_class=model.route_class)
    adapters = model.engine.engine.adapters

    @router.post("/v1/load_lora_adapter", response_model=None)
    async def load_lora_adapter(body: LoadAdapterRequest) -> Response:
        check_allowed(model)
        path = Path(body.lora_path)
        if not await asyncio.to_thread(path.is_dir):
            raise ApiError(404, f"there is no directory {body.lora_path!r:.200}", param="lora_path")
        await asyncio.to_thread(adapters.load, body.lora_name, path, taken=model.names, in_place=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_model=None)
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> Response:
        check_allowed(model)
        if adapters.find(body.lora_name) is None:
            raise ApiError(404, f"there is no adapter {body.lora_name!r:.100}", param="lora_name")
        adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


def check_allowed(model: ServedModel) -> None:
    """403 unless the server was started for this: paths reveal which files exist on its machine."""
    if not model.allows_lora_updates:
        raise ApiError(403, "this server was started without --allow-lora-updates, or as one of several replicas")
