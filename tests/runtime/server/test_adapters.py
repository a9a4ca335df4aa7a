"""Adapters over HTTP: the model's name chooses, and names come and go while requests run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.adapters.directories import written_adapter
from tests.runtime.server.conftest import LiveServer, serving

PROMPT = {"prompt": "ROMEO:", "max_tokens": 12, "temperature": 0}


def bard_adapter(directory: Path, seed: int, rank: int = 4) -> Path:
    """Of the shipped draft model's value and output projections."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, WIDTH, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(WIDTH, rank, generator=generator) * 0.3
    return written_adapter(directory, tensors, r=rank)


WIDTH = 128


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [bard_adapter(folder / f"style{i}", seed=i) for i in range(4)]


@pytest.fixture(scope="module")
def engine(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from llmc.compiler import build

    path = tmp_path_factory.mktemp("engine") / "bard.llmc"
    pools: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "lora_targets": ["o_proj"]}
    build(model_directory, path, dtype="float32", max_model_len=512, max_sequences=16, **pools)
    return path


@pytest.fixture(scope="module")
def adapted(engine: Path, adapters: list[Path]) -> Iterator[LiveServer]:
    flags = ["--served-model-name", "bard", "--allow-lora-updates", "--enable-lora"]
    for directory in adapters[:2]:
        flags += ["--lora-modules", f"{directory.name}={directory}"]
    with serving(engine, *flags) as live:
        yield live


def complete(client: httpx.Client, model: str) -> str:
    answer = client.post("/v1/completions", json={"model": model, **PROMPT})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_the_models_name_chooses(adapted: LiveServer) -> None:
    with adapted.client() as client:
        listed = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert list(listed) == ["bard", "style0", "style1"]
        assert (listed["bard"]["parent"], listed["style0"]["parent"]) == (None, "bard")
        assert client.get("/v1/models/style1").json()["id"] == "style1"
        texts = [complete(client, name) for name in ("bard", "style0", "style1")]
        assert len(set(texts)) == 3
        assert [complete(client, name) for name in ("style1", "bard", "style0")] == [texts[2], texts[0], texts[1]]
        unknown = client.post("/v1/completions", json={"model": "style9", **PROMPT})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        chat = client.post(
            "/v1/chat/completions",
            json={"model": "style0", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 4},
        )
        assert chat.json()["model"] == "style0"


def test_load_and_unload(adapted: LiveServer, adapters: list[Path]) -> None:
    with adapted.client() as client:
        asked = {"lora_name": "late", "lora_path": str(adapters[2])}
        loaded = client.post("/v1/load_lora_adapter", json=asked)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'late' added successfully.")
        first = complete(client, "late")
        again = client.post("/v1/load_lora_adapter", json=asked)
        assert (again.status_code, again.json()["error"]["type"]) == (400, "invalid_request_error")
        in_place = {"lora_name": "late", "lora_path": str(adapters[3]), "load_inplace": True}
        assert client.post("/v1/load_lora_adapter", json=in_place).status_code == 200
        assert complete(client, "late") != first
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 200
        assert client.post("/v1/completions", json={"model": "late", **PROMPT}).status_code == 404
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 404


def test_bad_adapters_get_openais_errors(adapted: LiveServer, adapters: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    broken = bard_adapter(tmp_path / "broken", 1)
    (broken / "adapter_model.safetensors").write_bytes(b"\xff" * 40)
    cases = [
        ("late", tmp_path / "nowhere", 404, "no directory"),
        ("late", tmp_path / "empty", 400, "adapter_config.json"),
        ("late", broken, 400, "header"),
        ("late", bard_adapter(tmp_path / "high", 1, rank=17), 400, "rank 17"),
        ("bard", adapters[2], 400, "the name of the model itself"),
        ("style0", adapters[2], 400, "already"),
    ]
    with adapted.client() as client:
        for name, path, status, said in cases:
            answer = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
            assert answer.status_code == status, answer.text
            assert said in answer.json()["error"]["message"] or said in str(path / said)
        assert client.post("/v1/load_lora_adapter", json={"lora_name": "x"}).status_code == 400
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["bard", "style0", "style1"]


@pytest.mark.parametrize("streams", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_load_and_unload_under_streams(adapted: LiveServer, adapters: list[Path], streams: int) -> None:
    """Names come and go, in more adapters than there are slots; what had begun ends as it would have alone."""
    with adapted.client() as client:
        wanted = {name: complete(client, name) for name in ("bard", "style0", "style1")}
    answers: list[tuple[str, str]] = []

    def ask(number: int) -> None:
        name = ("bard", "style0", "style1")[number % 3]
        with adapted.client() as own:
            answers.append((name, complete(own, name)))

    def change(number: int) -> None:
        name = f"passing{number}"
        with adapted.client() as own:
            asked = {"lora_name": name, "lora_path": str(adapters[2 + number % 2])}
            assert own.post("/v1/load_lora_adapter", json=asked).status_code == 200
            complete(own, name)
            assert own.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200

    jobs = [threading.Thread(target=ask, args=(i,)) for i in range(streams)]
    jobs += [threading.Thread(target=change, args=(i,)) for i in range(streams // 5)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert len(answers) == streams
    assert all(text == wanted[name] for name, text in answers)
    with adapted.client() as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["bard", "style0", "style1"]
        assert complete(client, "style0") == wanted["style0"]


def test_servers_without_the_flag_load_nothing(client: httpx.Client, adapters: list[Path]) -> None:
    asked = {"lora_name": "late", "lora_path": str(adapters[0])}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        answer = client.post(path, json=asked if "unload" not in path else {"lora_name": "late"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
