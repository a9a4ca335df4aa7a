"""The Ray Serve application on a Ray instance of this machine: answers, streams, scales up under load."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmc.errors import OptionError
from llmc.runtime.server.options import ServeOptions, parsed
from llmc.runtime.server.ray_app import RayOptions
from tests.runtime.server.conftest import eventually


def test_options_of_the_command_line() -> None:
    assert parsed(ServeOptions, "port", "9") == 9
    assert parsed(ServeOptions, "engine", "/e") == Path("/e")
    assert parsed(ServeOptions, "enable_prefix_caching", "false") is False
    assert parsed(ServeOptions, "api_keys", "k") == ("k",)
    assert parsed(RayOptions, "target_ongoing_requests", "2.5") == 2.5
    for name, value in (("port", "x"), ("prot", "1"), ("enable_prefix_caching", "maybe")):
        with pytest.raises(OptionError):
            parsed(ServeOptions, name, value)
    with pytest.raises(OptionError, match="replicas"):
        RayOptions(min_replicas=3, max_replicas=2)


@pytest.fixture(scope="module")
def address(engine_directory: Path) -> Iterator[str]:
    """The application on Ray, with up to two replicas."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'llmc-compiler[ray]'")
    from ray import serve

    from llmc.runtime.server.ray_app import build

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": 8265 + 37})
    # Ray's command line gives texts.
    arguments = {
        "engine": str(engine_directory),
        "threads": "1",
        "api_keys": "key",
        "max_replicas": "2",
        "target_ongoing_requests": "1",
        "upscale_delay_s": "0.5",
    }
    serve.run(build(arguments), name="llmc-test", route_prefix="/")
    yield f"http://127.0.0.1:{8265 + 37}"
    serve.shutdown()
    ray.shutdown()


@pytest.mark.slow
def test_completions_and_streams(address: str) -> None:
    headers = {"Authorization": "Bearer key"}
    assert httpx.get(f"{address}/v1/models").status_code == 401
    with httpx.Client(base_url=address, headers=headers, timeout=60) as client:
        body = {"prompt": "The king", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-1]]
        assert "".join(pieces) == whole and len(pieces) > 1


@pytest.mark.slow
def test_load_brings_a_second_replica(address: str) -> None:
    from ray import serve

    stop = threading.Event()

    def ask() -> None:
        body = {"prompt": "The king", "max_tokens": 400, "ignore_eos": True}
        with httpx.Client(base_url=address, headers={"Authorization": "Bearer key"}, timeout=120) as client:
            while not stop.is_set():
                assert client.post("/v1/completions", json=body).status_code == 200

    def replicas() -> Any:
        deployment = serve.status().applications["llmc-test"].deployments["llmc"]
        return deployment.replica_states.get("RUNNING", 0)

    users = [threading.Thread(target=ask) for _ in range(6)]
    for user in users:
        user.start()
    try:
        eventually(lambda: replicas() == 2, 120)
    finally:
        stop.set()
        for user in users:
            user.join()
