"""Ranks that torchrun starts: on this machine over gloo, and on two machines, which are network namespaces here."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.errors import RankError
from llmc.runtime.engine import Engine
from llmc.runtime.loading import load
from llmc.runtime.ranks.between_machines import meeting
from llmc.runtime.ranks.launch import Launch, launched
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.server.options import ServeOptions
from llmc.runtime.server.replicas.serve_replicas import serve_replicas
from tests.runtime.ranks.conftest import NewEngine
from tests.tiny_models import tiny_tokens

PROMPTS = [tiny_tokens(33), tiny_tokens(7)]
MODEL = Path(__file__).parent.parent.parent.parent / "examples" / "models" / "bard-draft"
LOAD = """
import json, sys
from llmc.runtime.loading import load
load(sys.argv[1], threads=1, **json.loads(sys.argv[2]))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would say."""
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in numbers.items()}}


@contextmanager
def other_rank(path: Path, environment: Mapping[str, str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Which loads the engine with options, as torchrun's processes all do with one command line."""
    command = [sys.executable, "-c", LOAD, str(path), json.dumps(options)]
    process = subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes this process the first of two ranks; the port where they meet."""
    port = free_port()
    for name, value in variables(0, 2, port).items():
        monkeypatch.setenv(name, value)
    return port


@pytest.mark.slow
def test_over_gloo(alone: Engine, of_ranks: NewEngine, first: int) -> None:
    """The tokens of one rank, and the bits of ranks that share memory; then the other one ends without an error, or is
    named when it is killed."""
    path = of_ranks(2)
    sampling = SamplingParams(max_tokens=48, temperature=0.0)
    expected = [c.token_ids for c in alone.generate(PROMPTS, sampling)]
    with other_rank(path, variables(1, 2, first)) as other:
        with load(path, threads=1) as engine:
            assert [c.token_ids for c in engine.generate(PROMPTS, sampling)] == expected
            logits = engine.logits(PROMPTS[0])
        assert other.wait() == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK")
        with load(path, threads=1) as engine:
            assert np.array_equal(engine.logits(PROMPTS[0]), logits)


def test_a_rank_that_is_killed_is_named(of_ranks: NewEngine, first: int) -> None:
    path = of_ranks(2)
    with other_rank(path, variables(1, 2, first)) as other, load(path, threads=1) as engine:
        other.kill()
        named = rf"rank 1 \(process {other.pid} on {socket.gethostname()}\) has closed its connection"
        with pytest.raises(RankError, match=named):
            engine.generate(PROMPTS, SamplingParams(max_tokens=90, ignore_eos=True))


@pytest.mark.slow
def test_another_engine_is_refused(of_ranks: NewEngine, first: int) -> None:
    with other_rank(of_ranks(2, max_sequences=3), variables(1, 2, first)) as other:
        with pytest.raises(RankError, match=r"rank 1 \(.*\) has a different engine from the first rank: manifest"):
            load(of_ranks(2), threads=1)
        assert "the first rank ended" in other.communicate()[1]


def test_a_port_in_use(of_ranks: NewEngine, first: int) -> None:
    with socket.create_server(("", first)), pytest.raises(RankError, match=f"port {first} is in use"):
        load(of_ranks(2), threads=1)


def test_another_rank_that_does_not_come_up(
    of_ranks: NewEngine, first: int, environment: Callable[[str, str], None]
) -> None:
    environment("LLMC_RANK_START_SECONDS", "0.2")
    with pytest.raises(RankError, match=r"rank 1 of 2 did not come up within 0.2 seconds"):
        load(of_ranks(2), threads=1)


def test_a_first_rank_that_does_not_come_up(
    environment: Callable[[str, str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """An error, and nothing of the library's beside it."""
    environment("LLMC_RANK_START_SECONDS", "0.2")
    launch = launched(variables(1, 2, free_port()))
    assert launch is not None
    with pytest.raises(RankError, match=r"rank 1 did not reach the first rank within 0.2 seconds"), meeting(launch):
        pass
    assert capfd.readouterr().err == ""


def test_as_many_processes_as_ranks(of_ranks: NewEngine, first: int) -> None:
    with pytest.raises(RankError, match="the engine was built for 3 ranks, and 2 processes were started"):
        load(of_ranks(3), threads=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_one_process_are_not_launched(
    rank: int, of_ranks: NewEngine, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the processes says so, and none waits for the others."""
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(RankError, match="2 processes, and an engine for reference that reference runs has its ranks"):
        load(of_ranks(2, target="reference"), threads=1)


def test_a_draft_of_several_ranks_is_not_launched(of_ranks: NewEngine, first: int) -> None:
    drafts = {"method": "draft_model", "model": str(of_ranks(2)), "num_speculative_tokens": 2}
    with pytest.raises(RankError, match="2 processes, the ranks of one engine, and the engine that drafts starts"):
        load(of_ranks(2), threads=1, speculation=drafts)


@pytest.mark.slow
def test_a_draft_of_one_rank_runs_beside_the_first(alone: Engine, of_ranks: NewEngine, first: int) -> None:
    """It drafts, and changes no token."""
    path, drafts = of_ranks(2), {"method": "draft_model", "model": str(of_ranks(1)), "num_speculative_tokens": 3}
    sampling = SamplingParams(max_tokens=24, temperature=0.0)
    expected = [c.token_ids for c in alone.generate(PROMPTS, sampling)]
    with other_rank(path, variables(1, 2, first), speculation=drafts) as other:
        with load(path, threads=1, speculation=drafts) as engine:
            completions = engine.generate(PROMPTS, sampling)
            assert engine.loop.speculation is not None
        assert other.wait() == 0
    assert [c.token_ids for c in completions] == expected


def test_replicas_are_not_launched(first: int) -> None:
    with pytest.raises(RankError, match="2 processes, the ranks of one engine, and each replica starts its own ranks"):
        serve_replicas(ServeOptions(engine=Path("engine.llmc")), 2, "prefix", lambda address: None)


def test_what_is_launched() -> None:
    assert launched({}) is None
    assert launched({"RANK": "0", "WORLD_SIZE": "1"}) is None
    local = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert launched({**variables(3, 4, 29500), **local}) == Launch(3, 4, 1, 2, "127.0.0.1", 29500)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "there is no rank 4 of 4"),
        ({"RANK": "-1"}, "RANK is not a number: '-1'"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not a number: ''"),
        ({"MASTER_ADDR": ""}, "rank 1 of 4 has no address of the first rank"),
    ],
)
def test_what_cannot_be_launched(change: dict[str, str], message: str) -> None:
    with pytest.raises(RankError, match=message):
        launched({**variables(1, 4, 29500), **change})


@contextmanager
def two_machines() -> Iterator[list[tuple[str, str]]]:
    """Network namespaces that a cable joins: the name and the address of each. Skips a test where none can be made."""
    ip, tag = shutil.which("ip"), f"llmc{os.getpid()}"
    if ip is None:
        pytest.skip("there is no `ip` to make network namespaces with")
    names, addresses = [f"{tag}a", f"{tag}b"], ["10.77.0.1", "10.77.0.2"]

    def run(*words: str) -> None:
        done = subprocess.run([ip, *words], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"network namespaces cannot be made here: ip {' '.join(words)}: {done.stderr.strip()}")

    try:
        for name in names:
            run("netns", "add", name)
        run("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            run("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            run("-n", name, "link", "set", "cable", "up")
            run("-n", name, "link", "set", "lo", "up")
        yield list(zip(names, addresses, strict=True))
    finally:
        for name in names:
            subprocess.run([ip, "netns", "del", name], capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_torchrun_on_two_machines(tmp_path: Path, tensor: int, stages: int) -> None:
    """The tokens of transformers; with stages, one on each."""
    from llmc.compiler import build

    sizes: dict[str, Any] = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    path = build(MODEL, tmp_path / "engine.llmc", dtype="float32", max_model_len=128, **sizes).path
    prompts = ("The king", "To be")
    asked = (*(word for prompt in prompts for word in ("--prompt", prompt)), "--max-tokens", "40", "--json")
    with two_machines() as machines:
        address = machines[0][1]
        processes = []
        for rank, (name, _) in enumerate(machines):
            meet = (
                "--nnodes=2",
                f"--nproc-per-node={tensor * stages // 2}",
                f"--node-rank={rank}",
                f"--master-addr={address}",
            )
            torchrun = (sys.executable, "-m", "torch.distributed.run", *meet, "--master-port=29511", "-m", "llmc")
            command = ["ip", "netns", "exec", name, *torchrun, "run", str(path), *asked]
            pipe = subprocess.PIPE
            processes.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))
        said = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert [json.loads(line)["token_ids"] for line in said[0][0].splitlines()] == [
        *map(tokens_of_transformers, prompts)
    ]
    assert said[1][0] == ""


def tokens_of_transformers(prompt: str) -> list[int]:
    """The 40 that the model itself finds likeliest."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    given = tokenizer(prompt, return_tensors="pt")
    written: list[int] = model.generate(**given, max_new_tokens=40, do_sample=False)[0].tolist()
    return written[given.input_ids.shape[1] :]
