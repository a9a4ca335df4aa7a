"""Engines for onnxruntime: the same text as generated C++ writes, in any company, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import llmc
from llmc.architectures.tiny_config import tiny_architecture
from llmc.engine_format.reader import read_engine
from llmc.errors import EngineFormatError, OptionError, TargetError
from llmc.runtime.engine import Engine
from llmc.runtime.executors.onnx_runtime import OnnxRuntimeExecutor
from tests.cli.command import assert_user_error
from tests.cli.command import llmc as command
from tests.quick_sample import quick_sample
from tests.runtime.server.conftest import serving
from tests.tiny_models import tiny_checkpoint, tiny_tokens
from tests.tree_steps import TABLE, check_trees

onnxruntime: Any = pytest.importorskip("onnxruntime", exc_type=ImportError)
MODEL = Path(__file__).parent.parent.parent / "examples" / "models" / "bard-draft"
SHAPE: dict[str, Any] = {"max_model_len": 192, "max_sequences": 8, "max_batch_tokens": 48}
PROMPTS = ["KING RICHARD:\n", "My lord,", "What is the matter with", "O", "Good morrow to you all, and " * 3]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("onnx") / "bard.llmc"
    return llmc.build(MODEL, path, target="onnxruntime", **SHAPE).path


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with llmc.load(path, threads=1) as opened:
        yield opened


def texts(engine: Engine) -> list[str]:
    params = llmc.SamplingParams(max_tokens=12, temperature=0.0)
    return [completion.choices[0].text for completion in engine.generate(PROMPTS, params)]


def test_greedy_text_is_that_of_generated_code(engine: Engine) -> None:
    together = texts(engine)
    with llmc.compile(MODEL, target="cpu", dtype="float32", **SHAPE) as ours:
        assert together == texts(ours)
        tokens = tiny_tokens(60, engine.info.vocab_size)
        expected = ours.logits(tokens)
    np.testing.assert_allclose(engine.logits(tokens), expected, rtol=0, atol=1e-4 * float(expected.std()))


def test_bits_do_not_depend_on_threads_and_neighbours(path: Path, engine: Engine) -> None:
    tokens = tiny_tokens(75, engine.info.vocab_size)
    params = llmc.SamplingParams(max_tokens=6, temperature=0.9, seed=5, logprobs=2, n=2)
    company = [tokens, tokens[:40], [3], tokens[20:52]]

    def bits(found: Any) -> list[object]:
        return [[(p.logprob.hex(), p.top) for p in choice.logprobs] for choice in found.choices]

    alone = [bits(engine.generate([prompt], params)[0]) for prompt in company]
    assert [bits(completion) for completion in engine.generate(company, params)] == alone
    with llmc.load(path, threads=2, prefix_cache=False, max_step_tokens=13) as other:
        assert [bits(completion) for completion in other.generate(company[::-1], params)] == alone[::-1]
        assert np.array_equal(other.logits(tokens), engine.logits(tokens))


# Experts, latents and states of each kind; weights of codes are computed while a step runs.
BESIDE = ("falcon_h1", "mamba", "rwkv", "xlstm", "kimi_linear", "mixtral", "deepseek_v3")
CASES = [*((family, "none") for family in BESIDE), ("llama", "int8"), ("llama", "int4:channel"), ("llama", "w8a8")]


@pytest.mark.parametrize(("family", "quantize"), quick_sample(CASES, [("mixtral", "none"), ("falcon_h1", "none")]))
def test_bits_do_not_depend_on_company_in_experts_and_states(family: str, quantize: str, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"max_model_len": 96, "max_sequences": 8, "max_batch_tokens": 48}
    given = tiny_architecture(family)
    given.save_pretrained(tmp_path / "model")
    llmc.build(tmp_path / "model", tmp_path / "e.llmc", target="onnxruntime", quantize=quantize, **shape)
    prompts = [tiny_tokens(count, 150) for count in (1, 6, 14)]
    params = llmc.SamplingParams(max_tokens=4, temperature=0.9, seed=5, logprobs=1, n=2, ignore_eos=True)

    def bits(engine: Engine, prompts: list[list[int]]) -> list[Any]:
        completions = engine.generate(prompts, params)
        return [[[p.logprob.hex() for p in c.logprobs or ()] for c in completion.choices] for completion in completions]

    with llmc.load(tmp_path / "e.llmc", threads=1) as engine:
        alone = [bits(engine, [prompt])[0] for prompt in prompts]
        assert bits(engine, prompts) == alone
        with llmc.load(tmp_path / "e.llmc", threads=2, max_step_tokens=5, prefix_cache=False) as cut:
            assert bits(cut, prompts[::-1]) == alone[::-1]
        expected = engine.logits(prompts[-1])
    with torch.inference_mode():
        theirs = given(input_ids=torch.tensor([prompts[-1]]), use_cache=False).logits[0].float().numpy()
    if quantize == "none":
        np.testing.assert_allclose(expected, theirs, rtol=0, atol=1e-4 * float(theirs.std()))


@pytest.mark.slow
def test_the_server(path: Path, engine: Engine) -> None:
    asked = {"model": path.stem, "prompt": PROMPTS, "max_tokens": 12, "temperature": 0}
    with serving(path) as live, live.client() as client:
        answer = client.post("/v1/completions", json=asked).json()
    assert [choice["text"] for choice in answer["choices"]] == texts(engine)


@pytest.mark.parametrize("seed", range(2))
def test_trees_have_the_bits_of_chains(path: Path, seed: int) -> None:
    executor = OnnxRuntimeExecutor(read_engine(path), len(TABLE), 1, on_device=False)
    check_trees(executor, 16, 4096, 9, seed)
    executor.close()


@pytest.mark.slow
def test_codes_of_four_bits_take_four_bits(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", torch.bfloat16, intermediate_size=128)
    logits = []
    for target in ("onnxruntime", "cpu"):
        out = tmp_path / f"{target}.llmc"
        llmc.build(model, out, target=target, dtype="float32", quantize="int4:g32:asym", max_model_len=64)
        with llmc.load(out) as opened:
            logits.append(opened.logits(tiny_tokens(30)))
    theirs, ours = logits
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-4 * float(ours.std()))
    stored = onnx.load(tmp_path / "onnxruntime.llmc" / "model.onnx", load_external_data=False).graph.initializer
    codes = [tensor for tensor in stored if tensor.data_type == onnx.TensorProto.INT4]
    assert codes
    for code in codes:
        lengths = {entry.key: entry.value for entry in code.external_data}
        assert 2 * int(lengths["length"]) == math.prod(code.dims)


def test_a_model_in_fewer_bits_is_widened_and_it_is_said(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", torch.bfloat16, num_hidden_layers=1)
    with pytest.warns(llmc.errors.BuildWarning, match="bfloat16, which engines for onnxruntime do not compute in"):
        llmc.build(model, tmp_path / "e.llmc", target="onnxruntime", max_model_len=32)
    assert read_engine(tmp_path / "e.llmc").manifest.model.dtype == "float32"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "bfloat16"}, "compute in float32, not bfloat16"),
        ({"kv_cache": "int8"}, "have no int8 codes in their caches"),
        ({"tensor_parallel_size": 2}, "have one rank, not 2"),
        ({"kv_compression": "snapkv:share=50"}, "have no kernels that choose or rotate rows for snapkv:share=50"),
        ({"speculative": "mtp"}, "have no built-in drafts"),
        ({"pipeline_parallel_size": 2}, "do not support pipeline stages"),
    ],
)
def test_what_it_cannot_do_is_named(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        llmc.build(MODEL, tmp_path / "e.llmc", target="onnxruntime", **options)


def test_a_provider_that_is_not_there_is_refused_and_not_replaced(path: Path) -> None:
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(TargetError, match="has no CUDAExecutionProvider"):
        llmc.load(path, executor="onnxruntime_cuda")
    with pytest.raises(OptionError, match="is run by onnxruntime or onnxruntime_cuda, not by 'cpp'"):
        llmc.load(path, executor="cpp")


def test_a_changed_model_is_not_run(path: Path, tmp_path: Path) -> None:
    copy = copytree(path, tmp_path / "copy.llmc")
    model = copy / "model.onnx"
    model.write_bytes(model.read_bytes()[:-1] + b"?")
    with pytest.raises(EngineFormatError, match=r"model\.onnx"):
        llmc.load(copy)


def test_an_engines_own_model_is_exported_as_it_is(path: Path, tmp_path: Path) -> None:
    report = llmc.export(path, tmp_path / "out")
    theirs, ours = onnx.load(path / "model.onnx"), onnx.load(report.path / "model.onnx")
    assert ours.SerializeToString() == theirs.SerializeToString()
    assert (report.path / "tokenizer.json").read_bytes() == (path / "tokenizer" / "tokenizer.json").read_bytes()
    with pytest.raises(OptionError, match="exports only its optimized graph"):
        llmc.export(path, tmp_path / "out", stage="serving")


def test_stages_of_an_engine_are_those_that_its_options_make(tmp_path: Path, draft_engine: Path) -> None:
    ours = llmc.export(draft_engine, tmp_path / "ours", against=MODEL, stage="canonical")
    theirs = llmc.export(MODEL, tmp_path / "theirs", stage="canonical")
    for name in ("model.onnx", "weights.safetensors", "config.json"):
        assert (ours.path / name).read_bytes() == (theirs.path / name).read_bytes()
    with pytest.raises(OptionError, match="the options of a built engine cannot be changed"):
        llmc.export(draft_engine, tmp_path / "ours", against=MODEL, quantize="int8")
    with pytest.raises(OptionError, match="this option applies to engines only"):
        llmc.export(MODEL, tmp_path / "ours", against=MODEL)


@pytest.mark.slow
def test_codes_of_an_engines_options_are_in_its_optimized_stage(tmp_path: Path) -> None:
    llmc.build(MODEL, tmp_path / "e.llmc", quantize="int8", **SHAPE)
    report = llmc.export(tmp_path / "e.llmc", tmp_path / "out", against=MODEL)
    model = onnx.load(report.path / "model.onnx", load_external_data=False)
    assert report.stage == "optimized" and "dequantize" in {function.name for function in model.functions}


def test_verbs_work_on_onnx_engines(path: Path, draft_engine: Path, tmp_path: Path) -> None:
    told = command("export", draft_engine, "-o", tmp_path / "out")
    assert_user_error(told, "an engine's graphs are text", "--against MODEL")
    run = command("run", path, "-p", "KING", "--max-tokens", "3", "--temperature", "0")
    assert run.code == 0, run
    assert command("inspect", path).code == 0
    bench = command(
        "bench", "latency", path, "--input-len", "4", "--output-len", "4", "--iterations", "1", "--warmup", "0"
    )
    assert bench.code == 0, bench
    assert_user_error(command("run", path, "-p", "KING", "--executor", "onnxruntime_cuda"), "CUDAExecutionProvider")
