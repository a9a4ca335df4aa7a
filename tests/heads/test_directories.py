"""Directories as sentence-transformers and transformers write them: task, pooling, products behind it, and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import llmc
from llmc.errors import CaptureError, CheckpointError, RequestError
from llmc.frontends.heads.sentence_modules import sentence_modules
from llmc.program import Head, Pooling, Similarity, Task
from llmc.runtime.head_rows import similarity
from tests.heads.tiny_texts import MODELS, least_cosine, rows_of, texts, tiny_model
from tests.quick_sample import quick_sample

_OLD, _NEW = "sentence_transformers.models", "sentence_transformers.sentence_transformer.modules"


def write_modules(directory: Path, kinds: dict[str, str], pooling: dict[str, Any]) -> None:
    """kinds: classes of the modules behind the model, by path."""
    listed: list[dict[str, Any]] = [{"idx": 0, "name": "0", "path": "", "type": f"{_OLD}.Transformer"}]
    for index, (path, kind) in enumerate(kinds.items(), 1):
        listed.append({"idx": index, "name": str(index), "path": path, "type": kind})
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))


def tokenizer(directory: Path) -> None:
    """One that has a token for each printable character."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({chr(code): code - 31 for code in range(32, 127)} | {"[UNK]": 0}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.save(str(directory / "tokenizer.json"))


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True}, Pooling.CLS),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, Pooling.LAST),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
        ({"pooling_mode": ["lasttoken"], "embedding_dimension": 32}, Pooling.LAST),
    ],
)
def test_both_forms_of_pooling_are_read(tmp_path: Path, pooling: dict[str, Any], expected: Pooling) -> None:
    """vllm#45995: a text was pooled by the default where 1_Pooling is written in the newer form."""
    write_modules(tmp_path, {"1_Pooling": f"{_NEW}.pooling.Pooling", "2_Normalize": f"{_NEW}.Normalize"}, pooling)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 1}))
    modules = sentence_modules(tmp_path)
    assert modules is not None and modules.max_length == 1
    assert (modules.head.pooling, modules.head.normalized) == (expected, True)


@pytest.mark.parametrize(
    ("kind", "pooling", "said"),
    [
        (f"{_OLD}.Pooling", {"pooling_mode_max_tokens": True}, "pooled by pooling_mode_max_tokens"),
        (f"{_OLD}.Pooling", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "expected one of"),
        (f"{_OLD}.Pooling", {}, "pooled by nothing"),
        (f"{_OLD}.Pooling", {"pooling_mode": "weightedmean"}, "pooled by weightedmean"),
        (f"{_OLD}.WordWeights", {"pooling_mode_cls_token": True}, "the module WordWeights .* is not known"),
        (f"{_OLD}.Normalize", {"pooling_mode_cls_token": True}, "no Pooling among the modules"),
    ],
)
def test_other_modules_are_refused(tmp_path: Path, kind: str, pooling: dict[str, Any], said: str) -> None:
    write_modules(tmp_path, {"1_Pooling": kind}, pooling)
    with pytest.raises(CaptureError, match=said):
        sentence_modules(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"path": "../x", "type": "a.Pooling"}]'])
def test_damaged_lists_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError):
        sentence_modules(tmp_path)


def test_a_model_of_sentence_transformers(tmp_path: Path) -> None:
    model = tiny_model("bert")
    model.save_pretrained(tmp_path)
    kinds = {"1_Pooling": f"{_OLD}.Pooling", "2_Dense": f"{_OLD}.Dense", "3_Normalize": f"{_OLD}.Normalize"}
    write_modules(tmp_path, kinds, {"pooling_mode_mean_tokens": True})
    dense = torch.nn.Linear(32, 12)
    (tmp_path / "2_Dense").mkdir()
    settings: dict[str, Any] = {"in_features": 32, "out_features": 12, "bias": True}
    settings |= {"activation_function": "torch.nn.modules.activation.Tanh"}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(settings))
    weights = {f"linear.{name}": value.detach() for name, value in dense.named_parameters()}
    save_file(weights, tmp_path / "2_Dense" / "model.safetensors")
    with llmc.compile(tmp_path, target="reference") as engine:
        head = engine.info.head
        assert head is not None and (head.task, head.pooling, head.width) == (Task.EMBED, Pooling.MEAN, 12)
        vectors = engine.embed(texts())
    with torch.no_grad():
        expected = torch.nn.functional.normalize(torch.tanh(dense(torch.from_numpy(rows_of(model, texts())))))
    assert np.abs(vectors - expected.numpy()).max() < 1e-5
    with llmc.compile(tmp_path, target="reference", pooling="cls") as engine:
        assert engine.info.head is not None and engine.info.head.width == 32


_PROMPTS = {"query": "Find: ", "passage": ""}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prompts": {"query": 1}}, "the prompts are"),
        ({"prompts": ["query: "]}, "the prompts are"),
        ({"prompts": _PROMPTS, "default_prompt_name": "document"}, "'document', which is not among.*query, passage"),
        ({"prompts": _PROMPTS, "default_prompt_name": ["query"]}, "default prompt is .'query'.*not among"),
        ({"similarity_fn_name": "hamming"}, "compared by 'hamming'"),
        ({"similarity_fn_name": ["dot"]}, "compared by .'dot'"),
        ({"prompts": _PROMPTS}, "the mean excludes the tokens of a text's prompt"),
    ],
)
def test_preparations_that_cannot_be_had_are_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    write_modules(
        tmp_path, {"1_Pooling": f"{_OLD}.Pooling"}, {"pooling_mode_mean_tokens": True, "include_prompt": False}
    )
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with pytest.raises((CaptureError, CheckpointError), match=said):
        sentence_modules(tmp_path)


@pytest.mark.parametrize(
    ("kind", "expected"), [("cosine", 0.96), ("dot", 24), ("euclidean", -(2**0.5)), ("manhattan", -2)]
)
def test_vectors_are_compared_as_the_model_does(kind: str, expected: float) -> None:
    head = Head(Task.EMBED, Pooling.MEAN, 2, whole_texts=True, similarity=Similarity(kind))
    similar = similarity(head, np.array([3, 4], np.float32), np.array([4, 3], np.float32))
    assert abs(similar - expected) < 1e-6


def test_texts_stand_behind_their_prompts(tmp_path: Path) -> None:
    """As in sentence-transformers' encode, encode_query and encode_document."""
    tiny_model("bert").save_pretrained(tmp_path)
    tokenizer(tmp_path)
    write_modules(tmp_path, {"1_Pooling": f"{_OLD}.Pooling"}, {"pooling_mode_mean_tokens": True})
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    settings = {"prompts": {**_PROMPTS, "topic": "Sort: "}, "default_prompt_name": "topic", "similarity_fn_name": "dot"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with llmc.compile(tmp_path, target="reference") as engine:
        encode = engine.tokenizer.encode

        def plain(*read: str) -> Any:
            return engine.embed([encode(text) for text in read])

        assert encode("Find: A") != encode("find: a")
        assert np.array_equal(engine.embed(["A Tree", "b"]), plain("sort: a tree", "sort: b"))
        assert np.array_equal(engine.embed("A Tree", prompt_name="query"), plain("find: a tree"))
        assert np.array_equal(engine.embed({"prompt": "A Tree"}, prompt_name="passage"), plain("a tree"))
        assert engine.embed([], prompt_name="query").shape == (0, 32)
        query, tree, b = plain("find: who?", "a tree", "b").astype(np.float64)
        assert engine.score("Who?", ["A Tree", "b"]) == [float(query @ tree), float(query @ b)]
        with pytest.raises(RequestError, match="no prompt 'document'; it has 'query', 'passage', 'topic'"):
            engine.embed("a", prompt_name="document")


@pytest.mark.parametrize("name", quick_sample(MODELS, ("xlm-roberta-score",)))
def test_saved_directories_say_their_task(tmp_path: Path, name: str) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    with llmc.compile(tmp_path, target="reference") as engine:
        rows = np.stack(engine.completer.rows(texts(), False))
        assert np.abs(rows - rows_of(model, texts())).max() <= 2e-5 * max(1.0, np.abs(rows).max())


def test_a_masked_model_embeds_by_its_bare_half(tmp_path: Path) -> None:
    from transformers import BertForMaskedLM

    bare = tiny_model("bert")
    masked = BertForMaskedLM(bare.config)
    bare.pooler = None
    masked.bert.load_state_dict(bare.state_dict())
    masked.save_pretrained(tmp_path)
    with llmc.compile(tmp_path, target="reference") as engine:
        assert least_cosine(engine.embed(texts()), rows_of(bare, texts())) >= 0.99999


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "bert"])
@pytest.mark.parametrize(("options", "least"), [({"dtype": "bfloat16"}, 0.999), ({"quantize": "int8"}, 0.999)])
def test_narrow_engines(name: str, options: dict[str, Any], least: float) -> None:
    model = tiny_model(name)
    with llmc.compile(model, target="cpu", max_batch_tokens=96, **options) as engine:
        vectors = engine.embed(texts())
        assert least_cosine(vectors, rows_of(model, texts())) >= least
        assert all(np.array_equal(engine.embed([text])[0], row) for text, row in zip(texts(), vectors, strict=True))
