"""The server's ASGI application: routes, errors, and around them the limits that every request passes."""

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from llmc.runtime.server.api_key import OPEN_PATHS, RequireApiKey, TrustRouter
from llmc.runtime.server.body_limit import LimitBody
from llmc.runtime.server.engine_metrics import EngineCollector
from llmc.runtime.server.errors import add_error_handlers
from llmc.runtime.server.host_check import CheckHost
from llmc.runtime.server.lifecycle import CountRequests, Lifecycle
from llmc.runtime.server.options import ServeOptions
from llmc.runtime.server.orderly_end import EndOrderly
from llmc.runtime.server.request_id import NameRequests
from llmc.runtime.server.request_metrics import CountAnswers
from llmc.runtime.server.routes.adapters import adapter_routes
from llmc.runtime.server.routes.chat import chat_routes
from llmc.runtime.server.routes.completions import completion_routes
from llmc.runtime.server.routes.docs import docs_routes
from llmc.runtime.server.routes.embeddings import embedding_routes
from llmc.runtime.server.routes.page import page_routes
from llmc.runtime.server.routes.responses import response_routes
from llmc.runtime.server.routes.status import status_routes
from llmc.runtime.server.routes.tokens import token_routes
from llmc.runtime.server.served_model import ServedModel

_BODY_SECONDS = 1.5


def create_app(
    model: ServedModel, registry: CollectorRegistry, options: ServeOptions, hosts: Sequence[str] | None
) -> FastAPI:
    """The application. registry: the one that the model's metrics are in. hosts: see outer_middleware."""
    registry.register(EngineCollector(model.engine, model.name, model.stall_seconds))
    return application(
        [Middleware(CountAnswers, metrics=model.metrics), *outer_middleware(model.lifecycle, options, hosts)],
        completion_routes(model),
        chat_routes(model),
        response_routes(model),
        embedding_routes(model),
        token_routes(model),
        adapter_routes(model),
        status_routes(model, registry),
    )


def application(middleware: Sequence[Middleware], *routes: APIRouter) -> FastAPI:
    """Return the application with the live page, the page of the routes, and errors in OpenAI's shape."""
    # FastAPI's page of the routes loads scripts from elsewhere; routes/docs.py has another.
    app = FastAPI(title="llmc", docs_url=None, redoc_url=None, middleware=middleware)
    for router in (*routes, page_routes(), docs_routes(app)):
        app.include_router(router)
    add_error_handlers(app)
    return app


def outer_middleware(lifecycle: Lifecycle, options: ServeOptions, hosts: Sequence[str] | None) -> list[Middleware]:
    """Middleware, outermost first: request id, host check, API key, lifecycle, body limit. hosts: allowed host names;
    None allows any.
    """
    layers = [Middleware(NameRequests, behind_router=options.behind_router)]
    if hosts is not None:
        layers.append(Middleware(CheckHost, hosts=hosts))
    if options.allowed_origins:
        origins = list(options.allowed_origins)
        layers.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    if options.behind_router:
        layers.append(Middleware(TrustRouter))
    if options.api_keys:
        is_open = OPEN_PATHS | {"/metrics"} if options.metrics_without_key else OPEN_PATHS
        layers.append(Middleware(RequireApiKey, keys=options.api_keys, open_paths=is_open))
    layers += [
        Middleware(CountRequests, lifecycle=lifecycle),
        Middleware(EndOrderly, lifecycle=lifecycle),
        Middleware(LimitBody, max_bytes=options.max_body_bytes, seconds=_BODY_SECONDS),
    ]
    return layers
