"""GET /docs: the routes and the fields of their requests, from the same description as /openapi.json, in plain HTML."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import HTMLResponse, Response

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "code{font-family:ui-monospace,monospace}summary{cursor:pointer}dt{margin-top:.4em}dd{color:#555}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}dd{color:#aaa}a{color:#8bf}}"
)


def docs_routes(app: FastAPI) -> APIRouter:
    """The route of the API documentation, generated when it is requested."""
    router = APIRouter()

    @router.get("/docs", response_model=None, include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(docs_page(app.openapi()), headers={"Content-Security-Policy": _POLICY})

    return router


def docs_page(description: Mapping[str, Any]) -> str:
    parts = "".join(
        f"<details><summary><code>{method.upper()} {escape(path)}</code></summary>{_fields(description, operation)}"
        "</details>\n"
        for path, operations in description["paths"].items()
        for method, operation in operations.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>llmc: routes</title><style>{_STYLE}</style>'
        f'<h1>Routes</h1><p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>\n{parts}</html>\n'
    )


def _fields(description: Mapping[str, Any], operation: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<dt><code>{escape(name)}</code>: {escape(_kind(field))}{', required' if is_required else ''}</dt>"
        f"<dd>{escape(field.get('description', ''))}</dd>"
        for name, field, is_required in _all_fields(description, operation)
    )
    return f"<dl>{rows}</dl>" if rows else "<p>Takes no fields.</p>"


def _all_fields(description: Mapping[str, Any], operation: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield the name and schema of each field and whether it is required: first the parameters, then the fields of the
    body."""
    for parameter in operation.get("parameters", ()):
        yield parameter["name"], parameter.get("schema", {}), parameter.get("required", False)
    for content in operation.get("requestBody", {}).get("content", {}).values():
        name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
        schema = description.get("components", {}).get("schemas", {}).get(name, {})
        for field, described in schema.get("properties", {}).items():
            yield field, described, field in schema.get("required", ())


def _kind(schema: Mapping[str, Any]) -> str:
    """A schema's type in a few words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(option) for option in schema["anyOf"]))
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema or "const" in schema:
        return " or ".join(map(repr, schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return f"array of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))
