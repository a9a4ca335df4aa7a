"""Each example runs as it stands, and shows what it says."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SHOWS = {
    "embed_texts.py": ["numbers per text, pooling last", "vectors: 4 of ", "1.0000  The king is dead, my lord."],
    "write_a_pass.py": ["split_norm_weight: 4 rewrites", "fold_norm_weight: 10 rewrites, 0 refused"],
    "find_a_wrong_pass.py": [
        "diff: wrong_norm is the first pass over its budget",
        "of pass wrong_norm: rms_norm_2",
        "TOO LARGE",
    ],
    "explain_a_refusal.py": [
        "1 of 2 RMSNorms fused; 1 refused",
        "found:    the user tanh_1",
        "logits: Tensor = self.head(y + torch.tanh(normalized))",
    ],
    "train_medusa_heads.py": ["head 2: top-1 0.", "the same answers, to the last token", "drafts came true"],
    "train_small_models.py": ["perplexity of held-out text: ", "My lord, "],
    "train_eagle3.py": ["drafts that are the model's likeliest token: 0.", "the same answers, to the last token"],
    "compile_for_a_gpu.py": [
        "decode, batch 1, context 256 on h100, predicted and not measured: ",
        "5 of 5 RMSNorms fused",
        "the whole report: report.html",
        "there is none to run it on",
        "llmc run engine.llmc --prompt TEXT",
        "My lord, my lord",
        "ship it: scp -r bard-draft-h100.llmc",
    ],
}


# One compiles a whole engine for a GPU, two train drafts and build engines with them. The same of smaller ones is held
# by tests/end_to_end/test_gpu_engine.py and tests/training.
ARGUMENTS = {
    "train_eagle3.py": ("--sequences", "16", "--steps", "4"),
    "train_small_models.py": ("hybrid", "--written", "2048", "--steps", "1"),
}
SLOW = (
    *("embed_texts.py", "find_a_wrong_pass.py", "compile_for_a_gpu.py"),
    *("train_medusa_heads.py", "train_eagle3.py", "train_small_models.py"),
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SHOWS])
def test_an_example(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, ())])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    shown = capsys.readouterr().out
    for part in SHOWS[name]:
        assert part in shown, shown
