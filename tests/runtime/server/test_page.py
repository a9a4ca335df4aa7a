"""The page at / in a headless Chromium: idle, under load, without a server; nothing from elsewhere."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.server.conftest import LiveServer, eventually

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, server: LiveServer) -> Iterator[Any]:
    """The page, which must not have complained or asked another host by the end of the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    opened = context.new_page()
    complaints: list[str] = []
    foreign: list[str] = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    opened.on(
        "request", lambda request: foreign.append(request.url) if not request.url.startswith(server.url) else None
    )
    opened.goto(server.url)
    yield opened
    context.close()
    assert complaints == []
    assert [url for url in foreign if not url.startswith("data:")] == []


def test_an_idle_server_is_shown(page: Any) -> None:
    page.wait_for_selector("#state.ok")
    assert page.inner_text("#name") == "bard"
    assert page.title() == "llmc · bard"
    assert "Nothing is running" in page.inner_text("#requests")
    assert "healthy" in page.inner_text("#uptime")
    total = page.inner_text("#blocks-note")
    assert "blocks of" in total and total[0].isdigit()
    assert page.locator("#pool i").count() == page.locator("#pool i:not(.u)").count()


def test_under_load(page: Any, server: LiveServer) -> None:
    stop = threading.Event()

    def ask() -> None:
        with server.client() as client:
            while not stop.is_set():
                client.post("/v1/completions", json={"prompt": "The king", "max_tokens": 400, "ignore_eos": True})

    users = [threading.Thread(target=ask) for _ in range(3)]
    for user in users:
        user.start()
    try:
        page.wait_for_selector("#requests .tag", timeout=300_000)
        page.wait_for_selector("#tokens path", state="attached", timeout=300_000)
        page.wait_for_selector("#latency circle", state="attached", timeout=300_000)
        # Answers are of one length and may all have just ended: the next ones take blocks again.
        page.wait_for_selector("#pool .u", state="attached", timeout=300_000)
        eventually(lambda: page.inner_text("#out")[0] in "123456789")
        assert page.inner_text("#ttft").endswith(("µs", "ms", "s"))
    finally:
        stop.set()
        for user in users:
            user.join()
    with server.client() as client:
        eventually(lambda: client.get("/live").json()["running"] == 0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_its_background(browser: Any, server: LiveServer, scheme: str) -> None:
    """WCAG's contrast of the ordinary text, at least 4.5."""
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto(server.url)
    page.wait_for_selector("#state.ok")
    contrast = page.evaluate(
        """() => {
        const light = c => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
            .map(x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4); 
            return .2126 * v[0] + .7152 * v[1] + .0722 * v[2]; };
        const of = (e, name) => light(getComputedStyle(document.querySelector(e))[name]);
        const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        return [ratio(of('.tile b', 'color'), of('section', 'backgroundColor')),
                ratio(of('.tile p', 'color'), of('section', 'backgroundColor'))];
    }"""
    )
    context.close()
    assert min(contrast) >= 4.5
