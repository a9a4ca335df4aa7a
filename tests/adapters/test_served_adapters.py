"""Adapters beside the weights: mixed steps give each request what its merged model would, and others what they get
from an engine without adapters, bit for bit."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llmc
from llmc.errors import AdapterError, OptionError, RequestError, RequestFaultError
from llmc.runtime.adapters.placed_adapter import PlacedAdapter
from llmc.runtime.engine import Engine
from llmc.runtime.requests.generation import Scoring
from llmc.runtime.requests.generation_request import GenerationRequest
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.adapters.directories import llama_adapter, peft_adapter, written_adapter
from tests.adapters.merged_logits import merged_logits
from tests.tiny_models import tiny_model, tiny_tokens

RANKS = (4, 64, 8, 16, 5, 32, 7, 24)
LIMITS: dict[str, Any] = {"max_model_len": 64, "max_batch_tokens": 48, "max_sequences": 12, "max_logit_rows": 48}
POOLS: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 64}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [llama_adapter(folder / f"a{i}", rank=rank, seed=i, scale=0.05) for i, rank in enumerate(RANKS)]


@pytest.fixture(scope="module")
def plain(checkpoint_of: Callable[..., Path]) -> Iterator[Engine]:
    with llmc.compile(checkpoint_of("llama"), **LIMITS) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(directories: list[Path], checkpoint_of: Callable[..., Path]) -> Iterator[Engine]:
    with llmc.compile(checkpoint_of("llama"), **LIMITS, **POOLS) as engine:
        for directory in directories:
            engine.load_adapter(directory.name, directory)
        yield engine


def together(engine: Engine, asked: Sequence[tuple[str | None, Sequence[int]]]) -> list[np.ndarray[Any, Any]]:
    """The logits of requests that share steps, each with its adapter."""
    find = engine.adapters.get
    requests = [Scoring(t, engine.info.vocab_size, None if name is None else find(name)) for name, t in asked]
    with engine.shared_loop.serving(requests) as until:
        until(lambda: all(request.finished for request in requests))
    return [request.logits for request in requests]


def test_mixed_batches_equal_each_merged_model(engine: Engine, plain: Engine, directories: list[Path]) -> None:
    """Eight adapters of ranks 4 to 64 in three slots, and requests without one among them."""
    asked: list[tuple[str | None, list[int]]] = []
    for i, directory in enumerate(directories):
        asked += [(directory.name, tiny_tokens(9 + i)), (None, tiny_tokens(5 + i)), (directory.name, tiny_tokens(3))]
    rows = together(engine, asked)
    for (name, tokens), logits in zip(asked, rows, strict=True):
        if name is None:
            assert np.array_equal(logits, plain.logits(tokens))
        else:
            expected = merged_logits(next(d for d in directories if d.name == name), tokens)
            assert np.abs(logits - expected).max() < 1e-4 * expected.std()
    base = merged_logits(None, asked[0][1])
    assert np.abs(rows[0] - base).max() > 0.1 * base.std()


def test_answers_do_not_depend_on_neighbours_or_chunks(engine: Engine, directories: list[Path]) -> None:
    tokens = tiny_tokens(60)
    alone = engine.logits(tokens, adapter="a1")
    among = together(engine, [("a0", tiny_tokens(31)), ("a1", tokens), (None, tiny_tokens(40)), ("a1", tokens[:20])])
    assert np.array_equal(among[1], alone)
    assert np.array_equal(among[3], alone[:20])


@pytest.mark.slow
def test_generation_is_the_merged_models(engine: Engine, directories: list[Path]) -> None:
    """Greedy, also with several choices, beams and drafts, which keep the adapter."""
    prompt = tiny_tokens(11)
    with llmc.compile(tiny_model("llama"), lora={"a2": directories[2]}, **LIMITS) as merged:
        for sampling in ({}, {"n": 2, "temperature": 1.0, "seed": 3}, {"beam_width": 2}):
            wanted = merged.generate([prompt], max_tokens=12, **sampling)
            completions = engine.generate([prompt], max_tokens=12, adapter="a2", **sampling)
            assert [c.token_ids for c in completions[0].choices] == [c.token_ids for c in wanted[0].choices]
        pieces = list(engine.stream(prompt, max_tokens=12, adapter="a2"))
        assert pieces[-1].tokens == 12
        wanted_ids = merged.generate([prompt], max_tokens=12)[0].token_ids
    drafting = {"method": "ngram", "num_speculative_tokens": 4}
    with llmc.load(engine.path, speculation=drafting) as speculating:
        speculating.load_adapter("a2", directories[2])
        assert speculating.generate([prompt], max_tokens=12, adapter="a2")[0].token_ids == wanted_ids


def test_decodes_and_prompts_of_many_adapters_share_steps(engine: Engine) -> None:
    """Where only some rows' logits are wanted, each of those still has its own adapter."""
    asked = [(name, tiny_tokens(5 + 7 * i)) for i, name in enumerate(("a0", None, "a4", "a0", None, "a7", "a5", "a4"))]
    params = SamplingParams(max_tokens=9)
    wanted = [engine.generate([t], params, adapter=name)[0].token_ids for name, t in asked]
    jobs = [
        engine.job_builder.job(
            GenerationRequest(
                prompt_token_ids=tuple(tokens),
                params=params,
                request_id=str(i),
                adapter=None if name is None else engine.adapters.get(name),
            )
        )
        for i, (name, tokens) in enumerate(asked)
    ]
    with engine.shared_loop.serving([job.first for job in jobs]) as until:
        until(lambda: all(job.finished for job in jobs))
    assert [job.results()[0].token_ids for job in jobs] == wanted


def test_an_adapter_that_cannot_be_written_ends_its_requests_alone(
    engine: Engine, directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, params = tiny_tokens(12), SamplingParams(max_tokens=6)
    wanted = {name: engine.generate([tokens], params, adapter=name)[0].token_ids for name in (None, "a1", "a2")}
    with llmc.load(engine.path) as other:
        for directory in directories[1:3]:
            other.load_adapter(directory.name, directory)
        broken = other.adapters.get("a1")
        put = type(other.loop.executor).put_adapter  # type: ignore[attr-defined]

        def put_adapter(executor: object, slot: int, adapter: PlacedAdapter) -> None:
            put(executor, slot, adapter)
            if adapter is broken:
                raise OSError("the device is out of memory")

        with monkeypatch.context() as patched:
            patched.setattr(type(other.loop.executor), "put_adapter", put_adapter)
            with ThreadPoolExecutor(4) as threads:
                names = ("a1", None, "a2", "a1")
                asked = {
                    index: threads.submit(other.generate, [tokens], params, adapter=name)
                    for index, name in enumerate(names)
                }
                for index, name in enumerate(names):
                    if name == "a1":
                        with pytest.raises(RequestFaultError, match="OSError was raised"):
                            asked[index].result()
                    else:
                        assert asked[index].result()[0].token_ids == wanted[name]
        assert other.loop.scheduler.idle and other.loop.pool.used == 0
        assert other.generate([tokens], params, adapter="a1")[0].token_ids == wanted["a1"], "it is written again"


def test_preempted_requests_keep_their_adapters(engine: Engine, directories: list[Path]) -> None:
    """A pool of so few blocks that requests give way to each other."""
    prompts = [tiny_tokens(17 + i) for i in range(4)]
    wanted = [engine.generate([p], max_tokens=20, adapter="a3")[0].token_ids for p in prompts]
    with llmc.load(engine.path, kv_cache_bytes=6 * 16 * 2 * 2 * 2 * 16 * 4) as small:
        small.load_adapter("a3", directories[3])
        completions = small.generate(prompts, max_tokens=20, adapter="a3")
        assert small.loop.scheduler.preemptions > 0
    assert [completion.token_ids for completion in completions] == wanted


def test_the_prefix_cache_knows_the_content(engine: Engine, directories: list[Path]) -> None:
    """The same name with other weights, or another name with the same, must not mix what was cached."""
    prompt = tiny_tokens(40)[::-1]  # No other test has left anything of it.
    base = engine.generate([prompt], max_tokens=2)[0]
    assert engine.generate([prompt], max_tokens=2)[0].cached_tokens == 32
    engine.load_adapter("changing", directories[0])
    first = engine.generate([prompt], max_tokens=8, adapter="changing")[0]
    assert first.cached_tokens == 0 and base.cached_tokens == 0
    assert engine.generate([prompt], max_tokens=8, adapter="changing")[0].cached_tokens == 32
    engine.unload_adapter("changing")
    engine.load_adapter("changing", directories[1])
    second = engine.generate([prompt], max_tokens=8, adapter="changing")[0]
    assert second.cached_tokens == 0
    assert second.token_ids == engine.generate([prompt], max_tokens=8, adapter="a1")[0].token_ids
    engine.unload_adapter("changing")


def test_adapters_that_come_and_go_leave_nothing(engine: Engine, directories: list[Path]) -> None:
    """Of those that were unloaded only what a slot still holds stays; slots and blocks are free again."""
    count, names = engine.adapters.pools.slots if engine.adapters.pools else 0, engine.adapters.names()
    alive: list[weakref.ref[PlacedAdapter]] = []
    for number in range(12):
        engine.load_adapter("passing", directories[number % len(directories)])
        alive.append(weakref.ref(engine.adapters.get("passing")))
        engine.generate([tiny_tokens(3), tiny_tokens(20)], max_tokens=3, adapter="passing")
        engine.unload_adapter("passing")
        assert engine.loop.pool.used == 0
    gc.collect()
    assert sum(reference() is not None for reference in alive) <= count
    assert engine.adapters.names() == names


@pytest.mark.slow
def test_an_engine_for_gpus(directories: list[Path]) -> None:
    """Compiled for one, and run by Triton's interpreter: more adapters than slots, each as its merged model."""
    limits = {**LIMITS, "target": "h100", "executor": "triton_interpreter", "dtype": "float32"}
    with (
        llmc.compile(tiny_model("llama"), **limits, **POOLS) as engine,
        llmc.compile(tiny_model("llama"), **limits) as plain,
    ):
        asked: list[tuple[str | None, list[int]]] = [(None, tiny_tokens(5))]
        for directory in directories[:4]:
            engine.load_adapter(directory.name, directory)
            asked.append((directory.name, tiny_tokens(4)))
        rows = together(engine, asked)
        assert np.array_equal(rows[0], plain.logits(asked[0][1]))
        for (_, tokens), logits, directory in zip(asked[1:], rows[1:], directories, strict=False):
            expected = merged_logits(directory, tokens)
            assert np.abs(logits - expected).max() < 1e-4 * expected.std()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3", "gemma2", "qwen2", "mixtral"])
def test_families_equal_peft(family: str, tmp_path: Path) -> None:
    """Weights that are transposed, whose rows are in another order, or merged, and attention beside experts."""
    model = tiny_model(family)
    targets = ["q_proj", "o_proj"] if family == "mixtral" else "all-linear"
    adapted = peft_adapter(copy.deepcopy(model), tmp_path, r=4, target_modules=targets)
    tokens = tiny_tokens(13)
    with torch.no_grad():
        expected = adapted(torch.tensor([tokens])).logits[0].numpy()
    with llmc.compile(model, **LIMITS, **POOLS) as engine, llmc.compile(model, **LIMITS) as plain:
        engine.load_adapter("a", tmp_path)
        assert np.abs(engine.logits(tokens, adapter="a") - expected).max() < 1e-4 * expected.std()
        assert np.array_equal(engine.logits(tokens), plain.logits(tokens))


BUILDS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"quantize": "int8"},
    {"quantize": "w8a8", "dtype": "bfloat16"},
    {"quantize": ("int4:g32", "down_proj=none")},
    {"sparsity": "magnitude:0.5"},
]


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_rows_without_adapters_are_bit_equal_in_every_build(build: dict[str, Any], directories: list[Path]) -> None:
    """And those with one are what the adapter makes of these weights, as far as they are rounded."""
    model = halved(tiny_model("llama")) if "sparsity" in build else tiny_model("llama")
    asked = [("a", tiny_tokens(14)), (None, tiny_tokens(21)), ("a", tiny_tokens(5))]
    with (
        llmc.compile(model, **LIMITS, **POOLS, **build) as engine,
        llmc.compile(model, **LIMITS, **build) as plain,
    ):
        engine.load_adapter("a", directories[1])
        rows = together(engine, asked)
        base = [plain.logits(tokens) for _, tokens in asked]
    assert np.array_equal(rows[1], base[1])
    wanted = merged_logits(directories[1], asked[0][1], model)
    change, expected = rows[0] - base[0], wanted - merged_logits(None, asked[0][1], model)
    cosine = (change * expected).sum() / np.linalg.norm(change) / np.linalg.norm(expected)
    assert cosine > 0.9


def halved(model: Any) -> Any:
    """The smaller half of each row of linear layers set to zero, so that what makes weights sparse finds it done."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "_proj" in name:
                weight[weight.abs() < weight.abs().median(dim=1, keepdim=True).values] = 0
    return model


def test_wrong_adapters_are_refused(engine: Engine, tmp_path: Path, directories: list[Path]) -> None:
    small = {"q.lora_A.weight": torch.zeros(4, 64), "q.lora_B.weight": torch.zeros(64, 4)}
    q = "model.layers.0.self_attn.q_proj"
    cases = {
        "of rank 65": (llama_adapter(tmp_path / "rank", rank=65), "has rank 65, the engine was built for 64"),
        "unknown": (written_adapter(tmp_path / "unknown", small), "no linear layer 'q'"),
        "shape": (
            written_adapter(
                tmp_path / "shape",
                {f"{q}.lora_A.weight": torch.zeros(4, 32), f"{q}.lora_B.weight": torch.zeros(64, 4)},
            ),
            "32 inputs and 64 outputs, the model's 64 and 64",
        ),
        "a0": (directories[0], "is called 'a0' already"),
        "nowhere": (tmp_path / "nowhere", "not a directory"),
        "nan": (llama_adapter(tmp_path / "nan", scale=float("nan")), "not finite"),
    }
    for name, (directory, problem) in cases.items():
        with pytest.raises(AdapterError) as raised:
            engine.load_adapter(name, directory)
        assert problem in str(raised.value)
    assert engine.adapters.names() == tuple(directory.name for directory in directories)
    with pytest.raises(AdapterError, match="there is no adapter 'b'"):
        engine.unload_adapter("b")
    with pytest.raises(RequestError, match="there is no adapter 'a9'"):
        engine.generate([[1, 2]], adapter="a9")
    with pytest.raises(RequestError, match="there is no adapter 'a9'"):
        engine.generate([[1, 2], [3]], adapter=[None, "a9"])
    with pytest.raises(RequestError, match="2 prompts came with 1 adapter"):
        engine.generate([[1, 2], [3]], adapter=["a0"])
    wrong: Any = ["a0"]
    for answer in (
        lambda: engine.generate([[1, 2]], adapter=[wrong]),
        lambda: engine.stream([1, 2], adapter=wrong),
        lambda: engine.logits([1, 2], adapter=wrong),
    ):
        with pytest.raises(RequestError, match=r"\['a0'\] \(list\) is not the name of an adapter"):
            answer()


def test_each_prompt_may_have_its_own_adapter(engine: Engine) -> None:
    prompts, names = [[1, 2, 3], [1, 2, 3], [4, 5]], ["a0", None, "a1"]
    together = engine.generate(prompts, max_tokens=5, adapter=names)
    alone = [
        engine.generate([prompt], max_tokens=5, adapter=name)[0] for prompt, name in zip(prompts, names, strict=True)
    ]
    assert [each.choices[0].token_ids for each in together] == [each.choices[0].token_ids for each in alone]
    assert together[0].choices[0].token_ids != together[1].choices[0].token_ids


def test_engines_without_pools_take_none(plain: Engine, directories: list[Path]) -> None:
    with pytest.raises(AdapterError, match="does not accept adapters"):
        plain.load_adapter("a", directories[0])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"target": "reference"}, "do not support adapters"),
        ({"target": "onnxruntime"}, "do not support adapters"),
        ({"tensor_parallel_size": 2}, "several ranks"),
        ({"target": "h100", "tensor_parallel_size": 2}, "several ranks"),
        ({"quantize": "int4-awq:g32"}, "AWQ"),
        ({"prune": "channels=0.25"}, "pruning"),
    ],
)
def test_builds_that_take_no_adapters(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=problem):
        llmc.build(tiny_model("llama"), tmp_path / "engine.llmc", enable_lora=True, **options)
