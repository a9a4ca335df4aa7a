"""`llmc models`: tiny models of transformers' architectures, and the page that is made of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

import llmc.architectures.survey
from llmc.architectures.page import models_page
from llmc.architectures.survey import LENGTH, Outcome, Verdict, survey
from llmc.architectures.tiny_config import architectures, tiny_architecture, tiny_config
from llmc.errors import CaptureError

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
KNOWN = dict(architectures())


def test_an_unknown_one_is_named() -> None:
    with pytest.raises(CaptureError, match="no causal architecture 'llamma'"):
        tiny_architecture("llamma")


def test_a_multimodal_one_has_small_parts() -> None:
    config = tiny_config("gemma3")
    assert config.text_config.hidden_size == config.vision_config.hidden_size == 64


@pytest.mark.parametrize(("at", "reason"), [(None, "it gates"), ("model.py:7", "it gates (model.py:7)")])
def test_a_refusal_says_where_if_that_is_known(at: str | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise CaptureError("it gates", at=at)

    monkeypatch.setattr(llmc.architectures.survey, "_built", refused)
    assert survey("llama", KNOWN["llama"], "reference") == Outcome(
        "llama", KNOWN["llama"], Verdict.REFUSED, reason=reason
    )


def test_the_page_says_each_verdict_once() -> None:
    outcomes = [
        Outcome("a", "AForCausalLM", Verdict.MATCHES, 3e-6, kv_bytes=512, state_bytes=1024),
        Outcome("a+old", "AForCausalLM", Verdict.MATCHES, 3e-6, kv_bytes=256, state_bytes=0),
        Outcome("b", "BForCausalLM", Verdict.REFUSED, reason="it has a | in it"),
    ]
    page = models_page(outcomes, "5.0", LENGTH)
    assert "Architectures: **1** compile and match, **1** refused. Variants: **1** compile and match." in page
    assert "| `a` | AForCausalLM | ≤ 1e-05 | 512 | 1,024 |" in page and "it has a \\| in it" in page


def test_docs_have_a_row_for_every_architecture() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w+-]+)` \|", text, re.MULTILINE)
    assert len(rows) == len(set(rows)) and set(KNOWN) <= set(rows)
    made_with = re.search(r"transformers\s+([\d.]+)\s+that llmc", text)
    assert made_with is not None
    # An older transformers lacks some that the page has.
    assert set(KNOWN) == set(rows) or Version(transformers.__version__) < Version(made_with.group(1))
    counts = [int(count) for count in re.findall(r"\*\*(\d+)\*\*", text)]
    assert sum(counts) == len(rows)


def test_a_tiny_model_is_the_same_each_time() -> None:
    """Also what transformers begins with as noise, such as the time steps of states."""
    first, again = (dict(tiny_architecture("mamba2").named_parameters()) for _ in range(2))
    assert all(torch.equal(value, again[name]) for name, value in first.items())
