"""Rerankers read a query and a document as a pair: tokens and segments as transformers' tokenizers give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llmc
from llmc.errors import CaptureError, RequestError
from llmc.frontends.heads.head_plan import pair_separator
from tests.heads.tiny_texts import tiny_model

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "the",
    "king",
    "is",
    "dead",
    "who",
    "was",
    "it",
    "a",
    "tree",
    "b",
    "c",
    "d",
]
QUERY, DOCUMENTS = "who was it", ["the king", "it was a tree", "dead"]


def write_tokenizer(directory: Path, *, second: str = "$B:1 [SEP]:1") -> Any:
    """BERT's template over words. second: how the second text of a pair stands in it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    pair = f"[CLS] $A [SEP] {second}"
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, special)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    wrapped: Any = PreTrainedTokenizerFast
    fast = wrapped(tokenizer_object=tokenizer, **names)
    fast.save_pretrained(directory)
    return fast


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A cross-encoder of BERT with two segments, saved, and what it scores the documents."""
    from transformers import BertForSequenceClassification

    directory = tmp_path_factory.mktemp("reranker")
    config = tiny_model("bert").config
    config.num_labels = 1
    torch.manual_seed(3)
    classifier: Any = BertForSequenceClassification
    model = classifier(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(directory)
    tokenizer = write_tokenizer(directory)
    scores = []
    for document in DOCUMENTS:
        given = tokenizer(QUERY, document, return_tensors="pt", return_token_type_ids=True)
        assert given["token_type_ids"].max() == 1
        with torch.no_grad():
            scores.append(float(model(given["input_ids"], token_type_ids=given["token_type_ids"]).logits[0, 0]))
    return directory, scores


@pytest.mark.parametrize("target", ["reference", pytest.param("cpu", marks=pytest.mark.slow)])
def test_pairs_are_scored_as_transformers_does(target: str, reranker: tuple[Path, list[float]]) -> None:
    directory, expected = reranker
    with llmc.compile(directory, target=target) as engine:
        bare = engine.score(QUERY, DOCUMENTS, activation=False)
        assert np.allclose(bare, expected, atol=1e-5)
        assert np.allclose(engine.score(QUERY, DOCUMENTS), 1 / (1 + np.exp(-np.array(expected))), atol=1e-6)
        alone = [engine.score([QUERY], [document], activation=False)[0] for document in DOCUMENTS]
        assert alone == bare and engine.score(QUERY, DOCUMENTS[1], activation=False) == [bare[1]]
        with pytest.raises(RequestError, match="2 queries and 3 documents"):
            engine.score([QUERY, QUERY], DOCUMENTS)
        with pytest.raises(RequestError, match="a score needs a pair of texts"):
            engine.score([[5, 6]], ["it"])


def test_separators_are_those_of_tokenizers(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert pair_separator(tmp_path, 2) == 3
    write_tokenizer(tmp_path, second="$B [SEP]")
    assert pair_separator(tmp_path, 2) is None
    write_tokenizer(tmp_path, second="$B:1 [SEP]")
    with pytest.raises(CaptureError, match="gives a pair the segments"):
        pair_separator(tmp_path, 2)
