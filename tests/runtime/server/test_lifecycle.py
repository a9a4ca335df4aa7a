"""Starting, API keys, health, disconnects, draining on SIGTERM, and flags that cannot be."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from llmc.errors import ModelFailureError
from llmc.runtime.loop.step_loop import StepLoop
from llmc.runtime.requests.job_builder import JobBuilder
from llmc.runtime.server.app import create_app
from llmc.runtime.server.options import ServeOptions
from llmc.runtime.server.serve import close_model, open_model
from llmc.runtime.server.served_model import ServedModel
from tests.cli.command import assert_user_error, llmc
from tests.logged_text import logged_text
from tests.runtime.server.conftest import LiveServer, eventually, metric, serving
from tests.runtime.server.held_server import held_serving

LONG_RESPONSE = {"input": "The king", "max_output_tokens": 400, "ignore_eos": True, "stream": True}
LONG = {"prompt": "The king", "max_tokens": 500, "ignore_eos": True, "temperature": 0}


def test_metrics_have_vllms_stems(client: httpx.Client) -> None:
    client.post("/v1/completions", json={"prompt": "The king", "max_tokens": 3})
    text = client.get("/metrics").text
    for stem in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket",
    ):
        assert re.search(rf'^llmc:{stem}{{.*model_name="bard".*}} [0-9.e+]+$', text, re.MULTILINE), stem
    assert metric(client, "llmc:generation_tokens_total") >= 3


def test_answers_are_counted_by_route_and_status(client: httpx.Client) -> None:
    def counted(path: str, status: int) -> float:
        label = re.escape(f'path="{path}",status="{status}"')
        match = re.search(rf"^llmc:http_requests_total{{.*{label}.*}} (.*)$", client.get("/metrics").text, re.MULTILINE)
        return float(match[1]) if match else 0.0

    asked = (("/v1/models/{name:path}", 404), ("/v1/completions", 400), ("unrouted", 413), ("unrouted", 404))
    before = [counted(*labels) for labels in asked]
    client.get("/v1/models/nobody")
    client.post("/v1/completions", json={})
    client.post("/v1/completions", content=b" " * (5 << 20))
    client.get("/nowhere/1")
    assert [counted(*labels) for labels in asked] == [count + 1 for count in before]


def test_a_client_that_leaves_frees_its_request(engine_directory: Path, tmp_path: Path) -> None:
    """And what is under way when the server is to end is finished."""
    with held_serving(engine_directory, tmp_path) as (live, steps), live.client() as client, live.client() as other:

        def running() -> float:
            return metric(client, "llmc:num_requests_running")

        steps.allow(1)
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            # It comes piece by piece: of 500 steps this one was let through.
            (begun,) = json.loads(next(answer.iter_lines()).removeprefix("data: "))["choices"]
            assert begun["finish_reason"] is None
        steps.until(lambda: running() == 0, 400)
        address = urlparse(live.url)
        with socket.create_connection((str(address.hostname), int(address.port or 0))) as raw:
            body = json.dumps({**LONG, "n": 8, "temperature": 1}).encode()
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            raw.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
            steps.until(lambda: running() == 8, 20)
        steps.until(lambda: running() == 0, 400)
        assert metric(client, "llmc:kv_cache_usage_perc") == 0
        aborted = [line for line in client.get("/metrics").text.splitlines() if 'finished_reason="abort"' in line]
        assert aborted and float(aborted[0].rpartition(" ")[2]) >= 2

        steps.allow(1)
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            live.process.send_signal(signal.SIGTERM)
            eventually(lambda: other.get("/health").status_code == 503)
            refused = other.post("/v1/completions", json={"prompt": "hi"})
            assert refused.status_code == 503 and refused.json()["error"]["message"]
            steps.allow(600)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        tokens = [json.loads(line.removeprefix("data: ")) for line in rest[:-1]]
        assert tokens[-1]["choices"][0]["finish_reason"] == "length"
        assert live.process.wait(300) == 0


def test_sigterm_before_it_listens(model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-m", "llmc", "serve", str(model_directory), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: any(tmp_path.iterdir()))  # It is being built.
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=300)[1]
        assert process.returncode == 0, said
        assert "http://" not in said and "Traceback" not in said
    finally:
        process.kill()


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_cut_off_is_told_so(engine_directory: Path, tmp_path: Path, replicas: int) -> None:
    """Streams end with an event (and [DONE]), other answers are a 503, and the log does not fill with tracebacks."""
    flags = ("--drain-seconds", "0", "--data-parallel-size", str(replicas))
    body = {**LONG, "n": 4, "temperature": 1}
    with ExitStack() as stack, ThreadPoolExecutor(6) as beside:
        live, steps = stack.enter_context(held_serving(engine_directory, tmp_path, *flags))
        client = stack.enter_context(live.client())

        def begin(path: str, asked: dict[str, Any]) -> Iterator[str]:
            lines = stack.enter_context(client.stream("POST", path, json=asked)).iter_lines()
            next(lines)
            return lines

        begun = [beside.submit(begin, "/v1/completions", {**body, "stream": True}) for _ in range(3)]
        begun.append(beside.submit(begin, "/v1/responses", LONG_RESPONSE))
        whole = [
            beside.submit(httpx.post, f"{live.url}/v1/completions", json={**body, "n": 1}, timeout=300)
            for _ in range(2)
        ]

        def is_full() -> bool:
            return metric(client, "llmc:num_requests_running") == 3 * 4 + 2 + 1 and all(x.done() for x in begun)

        steps.until(is_full, 300)
        *streams, response = [future.result() for future in begun]
        live.process.send_signal(signal.SIGTERM)
        for stream in streams:
            rest = [line for line in stream if line]
            error = json.loads(rest[-2].removeprefix("data: "))["error"]
            assert error["type"] == "service_unavailable_error" and "shutting down" in error["message"]
            assert rest[-1] == "data: [DONE]"
        *_, name, data = [line for line in response if line]
        event = json.loads(data.removeprefix("data: "))
        # The router has not read what the response's events hold.
        error = event["response"]["error"] if replicas == 1 else event
        assert name == f"event: {event['type']}" == f"event: {'response.failed' if replicas == 1 else 'error'}"
        assert "shutting down" in error["message"] and event["sequence_number"] > 1
        assert [answer.result().status_code for answer in whole] == [503, 503]
        steps.allow(600)  # The loop ends after the step that it is in.
        assert live.process.wait(300) == 0
        assert "Traceback" not in live.log() and "were cut off" in live.log()


def test_every_500_is_logged_under_the_name_that_the_client_is_told(
    in_process: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = TestClient(create_app(in_process, CollectorRegistry(), ServeOptions(engine=Path()), None))

    def asked(**more: object) -> tuple[Any, str]:
        with logged_text("llmc.server") as log:
            answer: Any = client.post("/v1/completions", json={"prompt": "hi", **more})
        return answer, log.getvalue()

    def fails(error: Exception) -> tuple[Any, str]:
        def check(*_: object) -> None:
            raise error

        monkeypatch.setattr(JobBuilder, "check", check)
        return asked()

    foreseen, log = fails(ModelFailureError("the model gave no usable logits"))
    assert "usable logits" in foreseen.json()["error"]["message"] and "Traceback" not in log
    names = [_named_in(foreseen, log)]
    unforeseen, log = fails(ZeroDivisionError("a bug"))
    assert "a bug" not in unforeseen.text and "ZeroDivisionError: a bug" in log and "Traceback" in log
    names.append(_named_in(unforeseen, log))
    names.append(_named_in(*asked(stream=True)))
    assert len(set(names)) == 3
    fine = client.get("/v1/models", headers={"X-Request-Id": "mine"})
    assert fine.headers["x-request-id"].startswith("req-")


def _named_in(answer: Any, log: str) -> str:
    """The request's id, which the header, the message and the log must agree on."""
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    name = str(answer.headers["x-request-id"])
    assert name in answer.json()["error"]["message"] and name in log
    return name


@pytest.fixture
def in_process(engine_directory: Path) -> Iterator[ServedModel]:
    """A served model in this process, whose loop a test may break."""
    model = open_model(ServeOptions(engine=engine_directory, stall_seconds=0.1), CollectorRegistry())
    yield model
    close_model(model)


def test_a_stuck_loop_is_not_healthy(in_process: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    client = TestClient(create_app(in_process, CollectorRegistry(), ServeOptions(engine=Path()), None))
    let_go, step = threading.Event(), StepLoop.step

    def stuck(loop: StepLoop) -> Any:
        let_go.wait(300)
        return step(loop)

    monkeypatch.setattr(StepLoop, "step", stuck)
    assert client.get("/health").status_code == 200
    asking = threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": {"prompt": "hi"}})
    asking.start()
    eventually(lambda: client.get("/health").status_code == 503)
    assert not client.get("/live").json()["healthy"], "not even with --stall-seconds"
    let_go.set()
    asking.join()
    assert client.get("/health").status_code == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_loop_is_not_healthy(in_process: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    client = TestClient(
        create_app(in_process, CollectorRegistry(), ServeOptions(engine=Path()), None), raise_server_exceptions=False
    )

    def dies(loop: StepLoop) -> Any:
        raise RuntimeError("the step broke")

    monkeypatch.setattr(StepLoop, "step", dies)
    first = client.post("/v1/completions", json={"prompt": "hi"})
    assert first.status_code >= 500 or first.json()["choices"][0]["finish_reason"] == "abort"
    eventually(lambda: client.get("/health").status_code == 503)
    answer = client.post("/v1/completions", json={"prompt": "hi"})
    assert answer.status_code == 503 and answer.json()["error"]["type"] == "service_unavailable_error"


@pytest.fixture(scope="module")
def guarded(engine_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """With keys, and what a configuration file says."""
    file = tmp_path_factory.mktemp("guarded") / "serve.yaml"
    file.write_text("served-model-name: [one, other]\nmax_model_len: 128\napi-key: filed\n")
    keys = [word for key in ("first", "second", "thïrd") for word in ("--api-key", key)]
    with serving(engine_directory, "--config", str(file), *keys, "--output-cache-bytes", "1000000") as live:
        yield live


def test_keys_guard_every_route_but_health(guarded: LiveServer) -> None:
    with guarded.client() as nobody:
        assert nobody.get("/health").status_code == 200
        for path in ("/", "/docs", "/live", "/metrics", "/v1/models", "/version", "/openapi.json", "/nothing"):
            assert nobody.get(path).status_code == 401, path
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = nobody.post(path, json={"prompt": "x"})
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert nobody.get("/").headers["www-authenticate"].startswith("Basic")
        assert nobody.get("/live", auth=("me", "first")).status_code == 200
        for wrong in ("Bearer", "Bearer firs", "Bearer first1", "Basic %%%", "first"):
            assert nobody.get("/v1/models", headers={"Authorization": wrong}).status_code == 401, wrong
        assert nobody.get("/docs").headers["www-authenticate"].startswith("Basic")
        page = nobody.get("/docs", auth=("me", "first"))
        assert "POST /v1/chat/completions" in page.text and "<code>max_tokens</code>: integer or null" in page.text
        assert "http" not in page.text and "<script" not in page.text, "nothing is loaded from elsewhere"
    with guarded.client("first") as known:
        assert known.get("/v1/models").status_code == 200
    bearer = {b"Authorization": "Bearer thïrd".encode()}
    assert httpx.get(f"{guarded.url}/v1/models", headers=bearer).status_code == 200


def test_keys_and_salts_share_no_cached_prefix(guarded: LiveServer) -> None:
    prompt = [7 + i % 50 for i in range(64)]
    with guarded.client("first") as first, guarded.client("second") as second:

        def hits(client: httpx.Client, **fields: Any) -> tuple[float, float]:
            """Prompt tokens found in the prefix cache, and answers found in the cache of outputs."""
            names = ("llmc:prefix_cache_hits_total", "llmc:output_cache_hits_total")
            before = [metric(first, name) for name in names]
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
            assert client.post("/v1/completions", json=body).status_code == 200
            gained = [metric(first, name) - count for name, count in zip(names, before, strict=True)]
            return gained[0], gained[1]

        assert hits(first) == (0, 0)
        assert hits(first, max_tokens=3)[0] > 0
        assert hits(first) == (0, 1)
        assert hits(second) == (0, 0)
        assert hits(second) == (0, 1)
        assert hits(second, cache_salt="a") == (0, 0)
        assert hits(second, cache_salt="b", max_tokens=3) == (0, 0)
        assert hits(second, temperature=1)[1] == 0, "an output with chance in it is not kept"
        assert metric(first, "llmc:output_cache_queries_total") >= 6
        assert metric(first, "llmc:output_cache_entries") >= 5
        assert 0 < metric(first, "llmc:output_cache_bytes") <= 1_000_000


def test_flags_and_a_configuration_file(guarded: LiveServer) -> None:
    """A flag goes before what the file says."""
    with guarded.client("second") as client:
        models = client.get("/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["one", "other"]
        assert models[0]["max_model_len"] == 128
        assert client.post("/v1/completions", json={"prompt": [5] * 124, "max_tokens": 9}).status_code == 400
        assert guarded.client("filed").get("/v1/models").status_code == 401


def test_flags_that_cannot_be(engine_directory: Path, tmp_path: Path) -> None:
    engine = str(engine_directory)
    config = tmp_path / "serve.yaml"
    config.write_text("prot: 1\n")
    for flags, part in (
        (["--port", "99999"], "99999"),
        (["--max-model-len", "4096"], "512"),
        (["--max-num-seqs", "4096"], "16"),
        (["--max-num-batched-tokens", "4096"], "512"),
        (["--kv-cache-memory-bytes", "1"], "kv_cache_bytes"),
        (["--chat-template", str(tmp_path / "absent.jinja")], "absent.jinja"),
        (["--tool-call-parser", "martian"], "hermes"),
        (["--uvicorn-log-level", "loud"], "loud"),
        (["--gpu-memory-utilization", "2"], "gpu-memory-utilization"),
        (["--config", str(config)], "prot"),
        (["--config", str(tmp_path / "absent.yaml")], "absent.yaml"),
        (["--data-parallel-size", "2", "--routing", "random"], "random"),
        (["--host", "203.0.113.1"], "203.0.113.1"),
    ):
        assert_user_error(llmc("serve", engine, *flags), part)
    assert_user_error(llmc("serve", str(tmp_path / "absent")), "absent")


def test_a_taken_port(server: LiveServer, engine_directory: Path) -> None:
    port = urlparse(server.url).port
    assert_user_error(llmc("serve", engine_directory, "--port", str(port)), "cannot listen", "--port 0")
