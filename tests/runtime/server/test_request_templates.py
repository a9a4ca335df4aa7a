"""Templates from requests: while they loop, plain requests are served; too many of them are told so at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from llmc.errors import LoadWarning, RequestError, UnavailableError
from llmc.runtime.server.app import create_app
from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.options import ServeOptions
from llmc.runtime.server.render_queue import RenderQueue
from llmc.runtime.server.serve import close_model, open_model
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.text.chat_template import BUILT_IN, ChatTemplate
from llmc.runtime.text.template_renderer import TemplateInput, TemplateRenderer

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
GIVEN = TemplateInput(USER)
PLAIN = ChatTemplate(BUILT_IN["plain"])


@pytest.fixture
def model(engine_directory: Path) -> Iterator[ServedModel]:
    """A served model whose templates from requests may loop for longer than any test."""
    opened = open_model(ServeOptions(engine=engine_directory), CollectorRegistry())
    endless = TemplateRenderer(workers=2, seconds=600, patience_seconds=600)
    model = replace(opened, request_renderer=RenderQueue(endless, threads=2, most_waiting=22))
    yield model
    close_model(model)


def test_looping_templates_hold_up_nobody(model: ServedModel) -> None:
    """24 of them run and wait throughout; the 25th is refused at once, long texts and other chats are served."""

    async def ask() -> None:
        transport = httpx.ASGITransport(app=create_app(model, CollectorRegistry(), ServeOptions(engine=Path()), None))
        async with httpx.AsyncClient(transport=transport, base_url="http://llmc", timeout=None) as client:

            async def chat(**more: Any) -> httpx.Response:
                return await client.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 1, **more})

            assert model.request_renderer is not None
            loops = [asyncio.create_task(chat(chat_template=LOOPS)) for _ in range(24)]
            while model.request_renderer.pending < 24:
                await asyncio.sleep(0.01)
            refused = await chat(chat_template=LOOPS)
            assert refused.status_code == 503, refused.text
            assert "wait to be rendered" in refused.json()["error"]["message"] and refused.headers["retry-after"]
            assert (await chat()).status_code == 200
            text = await client.post("/tokenize", json={"prompt": "a word " * 1000})
            assert text.status_code == 200
            assert not any(loop.done() for loop in loops)
            close_model(model)
            answers = await asyncio.gather(*loops, return_exceptions=True)
            assert all(isinstance(a, BaseException) or a.status_code >= 400 for a in answers)

    asyncio.run(ask())


def test_a_template_does_not_wait_for_its_seat_without_a_bound() -> None:
    """The time counts from the arrival: one that has used it up while it waited is not rendered any more."""
    renderer = TemplateRenderer(workers=1, seconds=600, patience_seconds=600)
    try:
        assert renderer.render(PLAIN, GIVEN).text.startswith("User: hi")
        with renderer._free, pytest.raises(UnavailableError, match="too many"):
            renderer.render(PLAIN, GIVEN, time.monotonic() - 600)
        assert renderer.render(PLAIN, GIVEN, time.monotonic()).text.startswith("User: hi")
    finally:
        renderer.close()


def test_a_deadline_counts_from_the_arrival() -> None:
    """Of a template's own seconds only those are left that its request has not waited."""
    renderer = TemplateRenderer(workers=1, seconds=600, patience_seconds=600)
    try:
        renderer.warm()
        with pytest.raises(RequestError, match="did not finish within") as caught:
            renderer.render(ChatTemplate(LOOPS), GIVEN, time.monotonic() - 599)
        assert not isinstance(caught.value, UnavailableError)
    finally:
        renderer.close()


def test_a_request_may_name_a_template_of_the_model(model: ServedModel) -> None:
    """Which needs no trust; another text does."""
    named = {"default": "D{{ messages[0].content }}", "rag": "R{{ messages[0].content }}"}
    served = replace(model, template=ChatTemplate(named["default"], {}, named), request_renderer=None)

    async def render(template: str | None) -> str:
        return (await served.render(GIVEN, template)).text

    assert asyncio.run(render(None)) == "Dhi" and asyncio.run(render("rag")) == "Rhi"
    with pytest.raises(ApiError, match="does not accept chat templates from requests"):
        asyncio.run(render("{{ messages[0].content }}"))


def test_what_a_template_lacks_is_told_at_the_start(engine_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "last.jinja").write_text("{{ messages[-1].content }}")
    options = ServeOptions(engine=engine_directory, chat_template=str(tmp_path / "last.jinja"))
    with pytest.warns(LoadWarning, match="the chat template does not show earlier turns"):
        opened = open_model(options, CollectorRegistry())
    close_model(opened)
