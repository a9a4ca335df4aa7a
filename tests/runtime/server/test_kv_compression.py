"""A server whose requests choose what their KV caches keep, and what it tells of rows that have left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

import llmc
from llmc.compiler import build
from tests.runtime.server.conftest import metric, serving

BUILT, LOADED = "stride:step=2,recent=16,rows=16", "stride:step=3,recent=16,rows=16"
BODY = {"prompt": "The king said that he", "max_tokens": 120, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("strided") / "bard.llmc"
    build(model_directory, path, dtype="float32", max_model_len=256, kv_compression=BUILT)
    return path


@pytest.fixture(scope="module")
def client(engine: Path) -> Iterator[httpx.Client]:
    with serving(engine, "--kv-compression", LOADED) as live, live.client() as opened:
        yield opened


def test_server_and_requests_choose(client: httpx.Client, engine: Path) -> None:
    with llmc.load(engine) as loaded:
        params = llmc.SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
        expected = {
            text: loaded.generate("The king said that he", replace(params, kv_compression=text))[0].text
            for text in (LOADED, BUILT, "none")
        }
    assert len({*expected.values()}) == 3
    before = client.get("/live").json()["rows"]["evicted"]
    for text, answer in expected.items():
        own = {} if text == LOADED else {"kv_compression": text}
        assert client.post("/v1/completions", json={**BODY, **own}).json()["choices"][0]["text"] == answer
    rows = client.get("/live").json()["rows"]
    assert rows["evicted"] > before and rows["kept"]
    assert metric(client, "llmc:kv_cache_evicted_rows_total") == rows["evicted"]
    assert metric(client, "llmc:kv_cache_kept_rows_total") == rows["kept"]
    page = client.get("/").text
    assert "live.rows.kept" in page and "live.rows.evicted" in page


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("snapkv:share=50", "the engine was built for stride:step=2"),
        ("stride:step=2,recent=10", "recent=10 is not a multiple of block_size=16"),
        ("stride:step=1,recent=16", "step=1 drops nothing"),
        ("strides:step=2", "is not a policy"),
        ("stride:step=2,recent=16,rows=1000000000000", "is not a number up to 2147483647"),
        (f"streaming:budget={10**20}", "is not a number up to 2147483647"),
        (5, "Input should be a valid string"),
    ],
)
def test_a_policy_that_cannot_be_is_the_client_s_error(client: httpx.Client, value: object, problem: str) -> None:
    answer = client.post("/v1/completions", json={**BODY, "kv_compression": value})
    error = answer.json()["error"]
    assert answer.status_code == 400 and problem in error["message"] and error["param"] == "kv_compression"
