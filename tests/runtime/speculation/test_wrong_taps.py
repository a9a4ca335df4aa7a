"""Drafts from the hidden states of other layers than a draft was trained on come true less often (vllm #50170: 1.2% for
58.9%). Only acceptance shows it: answers stay what they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llmc import SamplingParams, load
from llmc.compiler import build
from tests.runtime.speculation.matrix import FORMATS, MODELS, QUICK

pytestmark = pytest.mark.usefixtures("open_gate")
PROMPTS = ["KING RICHARD:", "First Citizen:\nBefore we proceed", "My lord,"]


def accepted(draft: Path, engine: Path) -> float:
    """The share of the drafts that came true, greedy."""
    build(MODELS / "bard-6m", engine, max_model_len=256, speculative=draft, **FORMATS[QUICK])
    with load(engine, speculation={"method": "eagle3", "num_speculative_tokens": 3}) as opened:
        opened.generate(PROMPTS, SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True))
        assert opened.loop.speculation is not None
        stats = opened.loop.speculation.stats
        return stats.accepted_tokens / stats.draft_tokens


@pytest.mark.slow
def test_states_one_layer_off_cost_acceptance(tmp_path: Path) -> None:
    right = accepted(MODELS / "bard-eagle3", tmp_path / "right.llmc")
    shifted = shutil.copytree(MODELS / "bard-eagle3", tmp_path / "shifted")
    settings = json.loads((shifted / "config.json").read_text())
    layers = settings["eagle_aux_hidden_state_layer_ids"]
    settings["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in layers]
    (shifted / "config.json").write_text(json.dumps(settings))
    wrong = accepted(shifted, tmp_path / "wrong.llmc")
    assert right > 0.3 and wrong < 0.85 * right
