"""Coverage and refusals: what was fused, what was not, and which user of which node is in the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import llmc
from llmc.architectures.tiny_config import tiny_architecture
from llmc.debug.explain_model import explain_model
from llmc.errors import EngineFormatError, OptionError, PassError
from llmc.frontends.capture import capture
from llmc.options import BuildOptions
from llmc.passes import Match, Refusal, Rewrite, default, extended
from llmc.passes.pipeline import canonical
from llmc.report.coverage.coverage import check_complete
from llmc.report.explanation import explain_engine, history
from llmc.report.explanation_text import overview_lines
from tests.family_captures import FamilyCaptures
from tests.plain_modules import VOCAB, SdpaAttention

OPTIONS = BuildOptions()
ONE_SCREEN = 40
SHIPPED = Path(__file__).parent.parent.parent / "examples" / "models" / "bard-draft"


class Norm(nn.Module):
    """RMSNorm written out; `normalized` is kept for whoever reads it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normalized = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normalized, normalized


class TwoNorms(nn.Module):
    """extra: reads what the second norm computes inside."""

    def __init__(self, extra: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.attention = SdpaAttention(16, 2)
        self.norm1, self.norm2 = Norm(16), Norm(16)
        self.head = nn.Linear(16, VOCAB)
        self.extra = extra

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.attention(self.norm1(x)[0])
        y, normalized = self.norm2(x)
        logits: Tensor = self.head(y + self.extra(normalized))
        return logits


def explain(module: nn.Module, **options: Any) -> Any:
    return explain_model(capture(module.eval(), OPTIONS), default(), BuildOptions(**options))


def test_the_shipped_model_is_covered_in_full() -> None:
    explanation = explain_model(capture(SHIPPED, OPTIONS), default(), OPTIONS)
    assert explanation.error is None
    assert all(not part.left for part in explanation.coverage)
    texts = [str(part) for part in explanation.coverage]
    layers = json.loads((SHIPPED / "config.json").read_text())["num_hidden_layers"]
    assert f"{layers} of {layers} attentions paged" in texts
    assert f"{2 * layers + 1} of {2 * layers + 1} RMSNorms fused" in texts
    check_complete(explanation.coverage)


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        "gpt2",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("llama", "gpt_neox", "cohere", "phi3", "qwen3")),
    ],
)
def test_families_is_covered_in_full(captured_family: FamilyCaptures, family: str) -> None:
    explanation = explain_model(captured_family(family).captured, default(), OPTIONS)
    assert [str(part) for part in explanation.coverage if part.left] == []
    assert "2 of 2 attentions paged" in [str(part) for part in explanation.coverage]


@pytest.mark.parametrize(("extra", "name", "op"), [(torch.tanh, "tanh", "aten.tanh"), (torch.exp, "exp", "aten.exp")])
def test_an_extra_user_is_named(extra: Callable[[Tensor], Tensor], name: str, op: str) -> None:
    explanation = explain(TwoNorms(extra))
    (norms,) = [part for part in explanation.coverage if part.what == "RMSNorms"]
    assert str(norms) == "1 of 2 RMSNorms fused; 1 refused"
    ((refusal,),) = [left.refusals for left in norms.left]
    assert refusal.reason.startswith(f"{refusal.node} is also used by {name}")
    (extra_user,) = [user for user in refusal.users if user.name in refusal.extra_users]
    assert extra_user.op == op and extra_user.type == "float32[T, 16]"
    assert "logits: Tensor = self.head(y + self.extra(normalized))" in str(extra_user.source)
    assert f"the user {extra_user.name}" == refusal.found
    assert "normalized = x * torch.rsqrt" in str(refusal.source)
    with pytest.raises(PassError, match="not everything is covered: 1 of 2 RMSNorms fused; 1 refused"):
        check_complete(explanation.coverage)


class ManyNorms(nn.Module):
    """In each layer a norm that is left alone, and logits that no engine returns."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.norms = nn.ModuleList(Norm(16) for _ in range(12))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm in self.norms:
            y, normalized = norm(x)
            x = y + torch.tanh(normalized)
        logits: Tensor = self.head(x).softmax(-1)
        return logits


def test_a_refused_model_is_explained_on_one_screen() -> None:
    lines = [line.text for line in overview_lines("mine", explain(ManyNorms()))]
    assert len(lines) <= ONE_SCREEN
    assert lines[0] == "mine is refused" and "the logits come from aten" in lines[1]
    assert "test_explain.py" in lines[2] and "softmax(-1)" in lines[2] and "fix:" in lines[3]
    assert sum("more at this line" in line for line in lines) == 2
    assert lines[-1].strip() == "and 11 more at this line: --pass fuse_rms_norm shows each"


@pytest.mark.slow
def test_a_refused_model_of_transformers_is_explained_on_one_screen() -> None:
    explanation = explain_model(capture(tiny_architecture("prophetnet"), OPTIONS), default(), OPTIONS)
    assert len(list(overview_lines("prophetnet", explanation))) <= ONE_SCREEN


# What is left over when a pass does not run, for each rule that a pass can be taken from.
LEFT_OVER = [
    ("llama", "fuse_rms_norm", "0 of 5 RMSNorms fused; 5 left over"),
    ("llama", "fuse_rope", "0 of 4 rotations by position fused; 4 left over"),
    ("llama", "fuse_gated_activation", "0 of 2 gated activations fused; 2 left over"),
    ("llama", "fuse_linear", "0 of 15 products with a weight recognised; 15 left over"),
    ("llama", "fuse_embedding", "0 of 1 embeddings recognised; 1 left over"),
    ("llama", "select_logit_rows", "0 of 1 outputs limited to requested rows; 1 left over"),
    ("llama", "fuse_gated_linear", "0 of 2 gated products made one; 2 left over"),
    ("llama", "merge_qkv", "0 of 2 groups of products of one input merged; 2 left over"),
    ("llama", "fuse_rope_kv_write", "0 of 2 rotations and cache writes made one; 2 left over"),
    ("gpt2", "fuse_layer_norm", "0 of 5 LayerNorms fused; 5 left over"),
    ("cohere", "fuse_layer_norm_without_bias", "0 of 3 LayerNorms fused; 3 left over"),
]


@pytest.mark.parametrize(("family", "disabled", "says"), LEFT_OVER)
def test_what_a_missing_pass_leaves_is_counted(
    captured_family: FamilyCaptures, family: str, disabled: str, says: str
) -> None:
    options = BuildOptions(disable_passes=(disabled,))
    # What the canonical passes leave can be counted before the others run.
    passes = canonical() if disabled in {pass_.name for pass_ in canonical()} else default()
    explanation = explain_model(captured_family(family).captured, passes, options)
    (short, *_) = [part for part in explanation.coverage if str(part) == says]
    assert short.reasons(short.left[0])[0].startswith(f"did not run: {disabled}")


def test_a_pipeline_that_fails_is_explained_up_to_there(captured_family: FamilyCaptures) -> None:
    options = BuildOptions(disable_passes=("fuse_rope",))
    explanation = explain_model(captured_family("llama").captured, default(), options)
    assert explanation.error is not None and "the contract 'rope' is missed" in explanation.error.problem
    assert explanation.passes[-1].name == "fuse_partial_rope"
    assert str(explanation.error) == explanation.to_json()["error"]


def test_passes_of_a_user_are_covered_by_their_refusals(captured_family: FamilyCaptures) -> None:
    def norm(x: Any, weight: Any, eps: Any) -> Any:
        return torch.ops.llmc.rms_norm.default(x, weight, eps)

    def same(x: Any, weight: Any, eps: float) -> Any:
        return torch.ops.llmc.rms_norm.default(x, weight, eps * 1.0000001)

    def not_the_last(match: Match) -> Refusal | None:
        name = match.bound["weight"].name
        return Refusal(f"{name} is the last", match.root) if name == "model_norm_weight" else None

    mine = Rewrite("mine", (norm,), same, not_the_last, applies=lambda m: m.bound["eps"] == 1e-6, after="fuse_rope")
    explanation = explain_model(captured_family("llama").captured, extended(mine), OPTIONS)
    assert str(explanation.coverage[-1]) == "4 of 5 candidates of mine rewritten; 1 refused"


def test_the_history_of_a_node(captured_family: FamilyCaptures) -> None:
    explanation = explain_model(captured_family("llama").captured, default(), OPTIONS)
    node_history = history(explanation, "rms_norm_1")
    assert node_history.made is not None and node_history.made[0] == "fuse_rms_norm"
    assert "rms_norm_1" in node_history.made[1].made and "self.weight * hidden_states" in str(
        node_history.made[1].source
    )
    selected = history(explanation, node_history.made[1].nodes[0])
    assert [name for name, _ in selected.used][-1] == "fuse_rms_norm"
    for wrong in (lambda: history(explanation, "no_such_node"), lambda: explanation.named("fuse_ropes")):
        with pytest.raises(OptionError) as error:
            wrong()
        assert error.value.fix is not None


def test_an_engine_explains_itself_the_same_way(tmp_path: Path, checkpoint_of: Callable[..., Path]) -> None:
    model = checkpoint_of("llama")
    path = llmc.build(model, tmp_path / "engine.llmc", target="reference").path
    built = explain_engine(path)
    again = explain_model(capture(model, OPTIONS), default(), OPTIONS)
    assert built.coverage == again.coverage
    assert [p.rewrites for p in built.passes] == [p.rewrites for p in again.passes]
    (path / "report" / "passes.json").write_text("[]")
    with pytest.raises(EngineFormatError):
        explain_engine(path)


def test_a_strict_build_fails_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(PassError, match="1 of 2 RMSNorms fused; 1 refused") as error:
        llmc.build(TwoNorms(torch.tanh).eval(), tmp_path / "engine.llmc", target="reference", strict=True)
    assert "normalized = x * torch.rsqrt" in str(error.value.at)
    assert not any(tmp_path.iterdir())
