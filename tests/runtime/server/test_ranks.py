"""A server of an engine of several ranks, of which one is killed: it says so, and serves what comes later."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from tests.runtime.server.conftest import LiveServer, eventually, metric, serving

BODY = {"prompt": "The king", "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def ranked_engine(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from llmc.compiler import build

    path = tmp_path_factory.mktemp("ranked") / "bard.llmc"
    build(model_directory, path, dtype="float32", max_model_len=512, max_sequences=16, tensor_parallel_size=2)
    return path


def other_rank(live: LiveServer) -> int:
    children = psutil.Process(live.process.pid).children()
    pids: list[int] = [child.pid for child in children if "llmc.runtime.ranks.worker" in child.cmdline()]
    assert len(pids) == 1
    return pids[0]


def text(client: httpx.Client) -> str:
    answer = client.post("/v1/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    generated: str = answer.json()["choices"][0]["text"]
    return generated


def restarts(client: httpx.Client) -> float:
    return metric(client, 'llmc:rank_restarts_total{model_name="bard",rank="1"}')


def test_a_lost_rank_is_started_again(ranked_engine: Path) -> None:
    with serving(ranked_engine) as live, live.client() as client:
        expected, lost = text(client), other_rank(live)
        stream = {**BODY, "max_tokens": 500, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=stream) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            os.kill(lost, signal.SIGKILL)
            *_, error, done = lines
        message = json.loads(error.removeprefix("data: "))["error"]["message"]
        assert f"rank 1 (process {lost}) was killed by signal 9" in message and done == "data: [DONE]"
        assert text(client) == expected
        assert restarts(client) == 1
        assert client.get("/health").status_code == 200
        # While nothing is in flight: nobody notices.
        os.kill(other_rank(live), signal.SIGKILL)
        eventually(lambda: restarts(client) == 2)
        assert text(client) == expected
    log = live.log()
    assert f"rank 1 (process {lost}) was killed by signal 9" in log and "1 requests end with an error" in log
    assert log.count("the engine's ranks were started again") == 2
