"""Rows of texts are those of transformers, in any company; what an engine is not built for is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import llmc
from llmc.errors import CaptureError, OptionError, RequestError
from llmc.frontends.capture import capture
from llmc.graph.step_inputs import is_of_logit_rows
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from llmc.program import Activation, Pooling, Task
from llmc.runtime.engine import Engine
from tests.heads.tiny_texts import MODELS, least_cosine, rows_of, texts, tiny_model
from tests.quick_sample import quick_sample
from tests.tiny_models import saved


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    """A model's engine for the reference executor, made once."""

    @cache
    def engine(name: str) -> Engine:
        directory = saved(tiny_model(name), tmp_path_factory.mktemp(name))
        return opened.enter_context(llmc.compile(directory, target="reference"))

    with ExitStack() as opened:
        yield engine


@pytest.mark.parametrize("name", quick_sample(MODELS, ("qwen3-labels", "modernbert-labels", "xlm-roberta-score")))
def test_rows_are_those_of_transformers(name: str, reference: Callable[[str], Engine]) -> None:
    engine = reference(name)
    rows = np.stack(engine.completer.rows(texts(), False))
    expected = rows_of(tiny_model(name), texts())
    assert np.abs(rows - expected).max() <= 2e-5 * max(1.0, np.abs(expected).max())
    alone = [engine.completer.rows([text], False)[0] for text in texts()]
    assert all(np.array_equal(vector, row) for vector, row in zip(alone, rows, strict=True))


@pytest.mark.parametrize("name", quick_sample(["qwen3", "bert", "modernbert"], ["bert"]))
def test_heads_of_bf16_are_computed_for_wanted_rows_alone(name: str) -> None:
    graph = capture(tiny_model(name), BuildOptions(dtype="bfloat16")).graph
    served = run_pipeline(graph, default(), BuildOptions()).graph
    (cast,) = served.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    assert served.logits() is cast and is_of_logit_rows(served, cast.all_input_nodes[0])


@pytest.fixture(scope="module", params=["qwen3", "bert"])
def of_cpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Engine]]:
    directory = tmp_path_factory.mktemp("rows")
    model, path = saved(tiny_model(request.param), directory / "model"), directory / f"{request.param}.llmc"
    llmc.build(model, path, max_batch_tokens=96)
    with llmc.load(path) as engine:
        yield request.param, engine


def test_vectors_of_a_compiled_engine(of_cpu: tuple[str, Engine]) -> None:
    name, engine = of_cpu
    vectors = engine.embed(texts(), normalize=False)
    assert least_cosine(vectors, rows_of(tiny_model(name), texts())) >= 0.99999
    for text, vector in zip(texts(), vectors, strict=True):
        assert np.array_equal(engine.embed([text], normalize=False)[0], vector)


def test_vectors_are_scaled_and_cut(of_cpu: tuple[str, Engine]) -> None:
    _, engine = of_cpu
    whole, cut = engine.embed(texts(), normalize=False), engine.embed(texts(), dimensions=5)
    assert cut.shape == (4, 5) and np.allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)
    assert np.allclose(cut, whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1, keepdims=True), atol=1e-6)
    assert engine.embed([]).shape == (0, 32)
    with pytest.raises(RequestError, match="dimensions cannot be 33"):
        engine.embed(texts(), dimensions=33)


def test_other_tasks_and_long_texts_are_refused(of_cpu: tuple[str, Engine]) -> None:
    name, engine = of_cpu
    with pytest.raises(RequestError, match=r"vectors of texts .* generates no text"):
        engine.generate([[5, 6]])
    with pytest.raises(RequestError, match="built for embed, not for classify"):
        engine.classify([[5, 6]])
    with pytest.raises(RequestError, match="97 tokens, this engine takes at most 96"):
        engine.embed([[5] * 97])
    assert np.array_equal(engine.embed([[5] * 97, [6]], truncate=True), engine.embed([[5] * 96, [6]]))
    with pytest.raises(OptionError, match="generates no tokens"):
        llmc.load(engine.path, speculation={"method": "ngram", "num_speculative_tokens": 2})
    if name == "bert":
        with pytest.raises(OptionError, match="cannot hold a whole text of 96"):
            llmc.load(engine.path, max_step_tokens=64)


def test_a_shared_beginning_is_found_in_the_cache(of_cpu: tuple[str, Engine]) -> None:
    name, engine = of_cpu
    (text,) = texts([70])
    hits = engine.loop.scheduler.prefix_cache.hits
    engine.embed([[*text[:64], 9]])
    again = engine.embed([[*text[:64], 7]])
    assert (engine.loop.scheduler.prefix_cache.hits > hits) == (name == "qwen3")
    assert np.array_equal(again[0], engine.embed([[*text[:64], 7]])[0])


def test_an_engine_that_generates_gives_no_rows() -> None:
    model = Path(__file__).parents[2] / "examples" / "models" / "bard-draft"
    compiled = llmc.compile(model, target="reference", max_model_len=64)
    with compiled as engine, pytest.raises(RequestError, match="the engine generates"):
        engine.embed(["The king"])


def test_texts_that_do_not_fit_into_a_step_are_refused_early() -> None:
    with pytest.raises(OptionError, match="texts of 96 tokens do not fit into a step of 64"):
        llmc.compile(tiny_model("bert"), target="reference", max_batch_tokens=64, max_model_len=96)
    with llmc.compile(tiny_model("bert"), target="reference", max_batch_tokens=64) as engine:
        assert engine.limits.max_model_len == 64


@pytest.mark.parametrize(
    ("name", "task", "pooling", "activation"),
    [
        ("qwen3-labels", Task.CLASSIFY, Pooling.LAST, Activation.SOFTMAX),
        ("xlm-roberta-score", Task.SCORE, Pooling.CLS, Activation.SIGMOID),
        ("modernbert-labels", Task.CLASSIFY, Pooling.MEAN, Activation.SOFTMAX),
    ],
)
def test_heads_are_those_of_the_model(
    name: str, task: Task, pooling: Pooling, activation: Activation, reference: Callable[[str], Engine]
) -> None:
    engine = reference(name)
    head = engine.info.head
    assert head is not None and (head.task, head.pooling, head.activation) == (task, pooling, activation)
    if task is Task.CLASSIFY:
        (classification,) = engine.classify(texts([7]))
        (row,) = rows_of(tiny_model(name), texts([7]))
        assert np.allclose(classification.scores, np.exp(row) / np.exp(row).sum(), atol=1e-5)
        assert classification.label == head.labels[int(row.argmax())]


def test_pairs_without_a_tokenizer_are_refused() -> None:
    model = tiny_model("bert-labels")
    with pytest.raises(CaptureError, match="gives one number, and this one has 3 labels"):
        llmc.compile(model, target="reference", task="score")
    model.config.id2label = {0: "fits"}
    with pytest.raises(CaptureError, match="distinguished by 2 segments, which follow from a tokenizer"):
        llmc.compile(model, target="reference", task="score")
