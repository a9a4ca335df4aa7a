"""GET /: the live page, one file without any assets from elsewhere."""

from importlib import resources

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

PAGE = "page.html"
# The page may run its own script and ask its own server, nothing else.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def page_routes() -> APIRouter:
    router = APIRouter()
    text = (resources.files("llmc.runtime.server") / PAGE).read_text(encoding="utf-8")

    @router.get("/", response_model=None)
    async def page() -> Response:
        return HTMLResponse(text, headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"})

    return router
