"""What no request is to blame for ends the engine: streams are told, the process ends or opens the engine anew."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlparse

import httpx
import psutil
import pytest

from tests.runtime.server.conftest import LiveServer, eventually, metric, serving
from tests.runtime.server.held_server import HOOK, HeldSteps, held_serving

Question = tuple[str, dict[str, object]]

POISON = 4000
KILLER = {"prompt": [5, POISON], "max_tokens": 2}
PLAIN = {"prompt": "The king", "max_tokens": 4, "temperature": 0}
# Greedy: a sampled token could be the poison.
BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "The king", "max_tokens": 450, "temperature": 0, "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 450,
        "temperature": 0,
        "ignore_eos": True,
    },
    "/v1/responses": {"input": "hi", "max_output_tokens": 450, "temperature": 0, "ignore_eos": True},
}


def ask(live: LiveServer, path: str, body: dict[str, object]) -> httpx.Response:
    with live.client() as client:
        return client.post(path, json=body)


def kill_in_flight(live: LiveServer, steps: HeldSteps, client: httpx.Client, questions: Sequence[Question]) -> None:
    """While answers are under way, which all hear of it: streams by an event before their end."""

    def is_over() -> bool:
        with suppress(httpx.TransportError):  # The process may be gone.
            client.get("/live")
        return all(answer.done() for answer in answers)

    with ThreadPoolExecutor(len(questions)) as threads:
        answers = [threads.submit(ask, live, *question) for question in questions]
        steps.until(lambda: metric(client, "llmc:num_requests_running") == len(questions), 200)
        # The poison is sent when `request` returns, before the server is asked anything else, so it is heard first.
        killer = HTTPConnection(urlparse(live.url).netloc)
        with closing(killer):
            killer.request("POST", "/v1/completions", json.dumps(KILLER), {"Content-Type": "application/json"})
            steps.until(is_over, 20)
            response = killer.getresponse()
            assert response.status == 503 and b"a step of the engine has failed" in response.read()
        for future in answers:
            check_told(future)


def check_told(answer: Future[httpx.Response]) -> None:
    response = answer.result()
    if response.status_code == 503:
        assert "a step of the engine has failed" in response.json()["error"]["message"]
        return
    assert response.status_code == 200
    lines = [line for line in response.text.splitlines() if line]
    if "/responses" in str(response.url):
        assert lines[-2] == "event: response.failed"
    else:
        assert "has failed" in json.loads(lines[-2].removeprefix("data: "))["error"]["message"]
        assert lines[-1] == "data: [DONE]"


def test_a_failed_engine_is_opened_anew_or_ends_the_process(engine_directory: Path, tmp_path: Path) -> None:
    with held_serving(engine_directory, tmp_path, "--engine-restarts", "1", failing_token=POISON) as (live, steps):
        steps.allow(4)
        wanted = ask(live, "/v1/completions", PLAIN).json()["choices"][0]["text"]
        with live.client() as client:
            assert metric(client, "llmc:engine_up") == 1 and metric(client, "llmc:engine_restarts_total") == 0
            asked = [(path, {**body, "stream": streams}) for path, body in BODIES.items() for streams in (True, False)]
            kill_in_flight(live, steps, client, asked)
            eventually(lambda: client.get("/health").status_code == 200)
            assert metric(client, "llmc:engine_up") == metric(client, "llmc:engine_restarts_total") == 1
            steps.allow(4)
            assert client.post("/v1/completions", json=PLAIN).json()["choices"][0]["text"] == wanted
            assert client.get("/live").json()["running"] == 0
            kill_in_flight(live, steps, client, asked[:1])
        assert live.process.wait(300) == 3, "it was opened anew once, as often as was asked for"
    assert "error: a step of the engine has failed: RuntimeError: the device fell off the bus" in live.log()


@pytest.mark.slow
def test_a_dead_replica_gets_nothing_and_is_replaced_at_once(engine_directory: Path) -> None:
    """Only what was at the dead one fails, however many ask meanwhile."""
    seen: Counter[int] = Counter()
    is_over = threading.Event()
    paths = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH"))))
    flags = ("--data-parallel-size", "2", "--routing", "least-loaded")
    environment = {"FAILING_TOKEN": str(POISON), "PYTHONPATH": paths}
    with serving(engine_directory, *flags, environment=environment) as pair, pair.client() as client:

        def go_on_asking() -> None:
            with pair.client() as own:
                while not is_over.is_set():
                    seen[own.post("/v1/completions", json=PLAIN).status_code] += 1

        with ThreadPoolExecutor(4) as threads:
            workers = {child.pid for child in psutil.Process(pair.process.pid).children()}
            asking = [threads.submit(go_on_asking) for _ in range(4)]
            eventually(lambda: seen[200] > 8)
            assert client.post("/v1/completions", json=KILLER).status_code == 503
            states = Counter[str]()

            def is_whole() -> bool:
                health = client.get("/health").json()
                states[health["status"]] += 1
                replaced = {child.pid for child in psutil.Process(pair.process.pid).children()} != workers
                return bool(health["healthy_replicas"] == 2 and replaced)

            eventually(is_whole)
            is_over.set()
            for future in asking:
                future.result()
        assert seen.keys() <= {200, 503} and seen[503] <= 4, "at most what was in flight there"
        assert states["degraded"], "/health says so meanwhile"
        assert metric(client, "llmc:replica_restarts") == 1 and metric(client, "llmc:engine_up") == 2
