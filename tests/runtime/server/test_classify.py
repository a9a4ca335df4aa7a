"""Labels and scores of pairs over HTTP: what transformers' classifier and cross-encoder say of the same texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llmc
from tests.heads.test_pairs import DOCUMENTS, QUERY, write_tokenizer
from tests.heads.tiny_texts import tiny_model
from tests.runtime.server.conftest import serving


def saved(name: str, directory: Path) -> tuple[Any, Any]:
    """A model and its tokenizer."""
    model = tiny_model(name)
    model.save_pretrained(directory)
    return model, write_tokenizer(directory)


@pytest.mark.slow
def test_probabilities_of_labels_equal_transformers(tmp_path: Path) -> None:
    model, tokenizer = saved("bert-labels", tmp_path / "model")
    llmc.build(tmp_path / "model", tmp_path / "engine.llmc", dtype="float32")
    with torch.inference_mode():
        rows = [model(tokenizer(text, return_tensors="pt")["input_ids"]).logits[0] for text in DOCUMENTS]
    expected = torch.stack(rows).softmax(-1).numpy()
    with serving(tmp_path / "engine.llmc") as server, server.client() as client:
        answer = client.post("/v1/classify", json={"input": DOCUMENTS}).json()
        refused = client.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS})
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    assert np.allclose([entry["probs"] for entry in answer["data"]], expected, atol=1e-5)
    labels = [model.config.id2label[int(row.argmax())] for row in rows]
    assert [entry["label"] for entry in answer["data"]] == labels
    assert refused.status_code == 400 and "built for classify" in refused.text


@pytest.mark.slow
def test_scores_of_pairs_equal_transformers(tmp_path: Path) -> None:
    model, tokenizer = saved("xlm-roberta-score", tmp_path / "model")
    llmc.build(tmp_path / "model", tmp_path / "engine.llmc", dtype="float32")
    with torch.inference_mode():
        pairs = [tokenizer(QUERY, document, return_tensors="pt")["input_ids"] for document in DOCUMENTS]
        expected = [float(model(pair).logits[0, 0].sigmoid()) for pair in pairs]
    with serving(tmp_path / "engine.llmc") as server, server.client() as client:
        scored = client.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()["data"]
        ranked = client.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    assert np.allclose([entry["score"] for entry in scored], expected, atol=1e-6)
    assert [entry["index"] for entry in ranked] == sorted(range(3), key=lambda index: -expected[index])
    assert np.allclose([entry["relevance_score"] for entry in ranked], sorted(expected, reverse=True), atol=1e-6)
