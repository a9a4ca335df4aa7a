"""Two replicas behind one port: answers, merged metrics, a killed replica, the end of all with the router."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from tests.runtime.server.conftest import LiveServer, eventually, metric, serving
from tests.runtime.server.held_server import held_serving

RESPONSE = {"input": "The king", "max_output_tokens": 400, "ignore_eos": True, "stream": True, "top_logprobs": 20}


@pytest.fixture(scope="module")
def pair(engine_directory: Path) -> Iterator[LiveServer]:
    with serving(engine_directory, "--data-parallel-size", "2", "--routing", "least-loaded") as live:
        yield live


def workers(live: LiveServer) -> list[psutil.Process]:
    children = psutil.Process(live.process.pid).children()
    return [child for child in children if "llmc.runtime.server.replicas.worker" in child.cmdline()]


def test_requests_are_answered_and_counted(pair: LiveServer) -> None:
    with pair.client() as client:
        assert client.get("/health").json() == {"status": "ok", "healthy_replicas": 2, "replicas": 2}
        assert client.get("/v1/models").json()["data"][0]["id"] == "bard"
        body = {"prompt": "The king", "max_tokens": 5, "temperature": 0}
        alone = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == alone
        assert client.post("/v1/completions", json={"prompt": "x", "n": 0}).status_code == 400
        assert metric(client, "llmc:generation_tokens_total") == 15
        text = client.get("/metrics").text
        assert 'replica="0"' in text and 'replica="1"' in text
        view = client.get("/live").json()
        assert [replica["index"] for replica in view["replicas"]] == [0, 1] and view["generation_tokens"] == 15


def test_load_is_spread(pair: LiveServer) -> None:
    """The second request comes while the first one is on its way: 8 MB that its client does not read, which is more
    than sockets hold.
    """
    body = {"prompt": "The king", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 8, "logprobs": 20}
    slow = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
    with pair.client() as client, httpx.Client(base_url=pair.url, transport=slow, timeout=300) as reluctant:
        before = {r["index"]: r["routed"] for r in client.get("/live").json()["replicas"]}
        with reluctant.stream("POST", "/v1/completions", json=body):
            second = client.post("/v1/completions", json={"prompt": "The king", "max_tokens": 1})
            assert second.status_code == 200
        after = {r["index"]: r["routed"] for r in client.get("/live").json()["replicas"]}
        assert [after[index] - before[index] for index in (0, 1)] == [1, 1]
        eventually(lambda: metric(client, "llmc:num_requests_running") == 0)


def test_a_response_is_found_where_it_was_made(pair: LiveServer) -> None:
    """Its id names the replica; when both are idle, other requests go to the first one."""
    body = {"input": "Good morrow", "max_output_tokens": 4, "temperature": 0}
    with pair.client() as client:

        def routed() -> list[int]:
            return [replica["routed"] for replica in client.get("/live").json()["replicas"]]

        made = client.post("/v1/responses", json=body).json()
        assert client.get(f"/v1/responses/{made['id']}").json() == made
        again = client.post("/v1/responses", json={**body, "previous_response_id": made["id"]}).json()
        assert again["usage"]["input_tokens"] > made["usage"]["input_tokens"]
        assert made["id"][:7] == again["id"][:7] in ("resp_00", "resp_01")
        of_second, before = f"resp_01{'0' * 32}", routed()
        assert client.get(f"/v1/responses/{of_second}").status_code == 404
        assert client.get(f"/v1/responses/{of_second}/input_items").status_code == 404
        assert client.delete(f"/v1/responses/{of_second}").status_code == 404
        assert client.post("/v1/responses", json={**body, "previous_response_id": of_second}).status_code == 400
        assert routed() == [before[0], before[1] + 4]


def test_a_killed_replica_is_started_again(pair: LiveServer) -> None:
    with pair.client() as client:
        victim = workers(pair)[0]
        os.kill(victim.pid, signal.SIGKILL)
        for _ in range(4):  # One of them would have met the dead replica.
            assert client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1}).status_code == 200
        eventually(lambda: client.get("/health").json().get("healthy_replicas") == 2 and len(workers(pair)) == 2)
        assert metric(client, "llmc:replica_restarts") == 1
        eventually(lambda: all(r["healthy"] for r in client.get("/live").json()["replicas"]))


def test_streams_of_killed_replicas_end_with_an_error(engine_directory: Path, tmp_path: Path) -> None:
    """Then nobody is healthy until they have been started again, and they end with the router."""
    body = {"prompt": "The king", "max_tokens": 400, "ignore_eos": True, "n": 2, "stream": True, "logprobs": 3}
    paths = ["/v1/completions"] * 4 + ["/v1/responses"]
    flags = ("--data-parallel-size", "2", "--uds", str(tmp_path / "socket"), "--api-key", "k")
    with ExitStack() as stack:
        live, steps = stack.enter_context(held_serving(engine_directory, tmp_path, *flags))
        client = stack.enter_context(live.client("k"))

        def begin(path: str) -> Iterator[str]:
            request = client.stream("POST", path, json=RESPONSE if path.endswith("responses") else body)
            lines = stack.enter_context(request).iter_lines()
            next(lines)
            return lines

        with ThreadPoolExecutor(len(paths)) as beside:
            begun = [beside.submit(begin, path) for path in paths]
            steps.until(lambda: client.get("/health").is_success and all(future.done() for future in begun), 300)
        *streams, response = [future.result() for future in begun]
        started = workers(live)
        for worker in started:
            worker.kill()
        *_, name, data = [line for line in response if line]
        last = json.loads(data.removeprefix("data: "))
        assert (name, last["type"]) == ("event: error", "error") and last["sequence_number"] > 0
        for stream in streams:
            rest = [line for line in stream if line]
            *events, error = [json.loads(line.removeprefix("data: ")) for line in rest[:-1]]
            assert error["error"]["type"] == "service_unavailable_error" and rest[-1] == "data: [DONE]"
            assert all(event["choices"] for event in events), "the events before it are whole"
        steps.allow(1)  # For the answer of one that was started again.
        answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
        assert answer.status_code in (200, 503)
        assert live.client().get("/v1/models").status_code == 401
        eventually(lambda: client.get("/health").status_code == 200 and len(workers(live)) == 2)
        started = workers(live)
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(300) == 0
        assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in started)
    assert "Traceback" not in live.log()
    assert live.log().count("has ended in its answer") == 5


@pytest.mark.slow
def test_workers_end_with_a_killed_router(engine_directory: Path) -> None:
    with serving(engine_directory, "--data-parallel-size", "2") as live:
        started = workers(live)
        assert len(started) == 2
        live.process.kill()
        eventually(lambda: not any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in started))
