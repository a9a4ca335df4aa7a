"""Capture of plain modules and exported programs: equal to eager, and failures that name the user's own line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from llmc.errors import CaptureError
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.weights import Constant, Stored
from llmc.options import BuildOptions
from tests.frontends.graph_execution import run_captured
from tests.logged_text import logged_text
from tests.plain_modules import CONTEXT, VOCAB, PlainDecoder, eager_decoder, sdpa_decoder
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_tokens

DECODERS = [sdpa_decoder, eager_decoder]


def assert_equals_eager(captured: Captured, module: nn.Module) -> None:
    """The graph's logits are the module's at several lengths, one token and the whole context among them."""
    for length in (1, 5, CONTEXT):
        tokens = tiny_tokens(length, VOCAB)
        with torch.no_grad():
            expected = module(torch.tensor([tokens]))[0][0]
        torch.testing.assert_close(run_captured(captured, tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("make", DECODERS)
def test_module_equals_eager(make: Callable[[], PlainDecoder]) -> None:
    module = make().train()
    captured = capture(module, BuildOptions())
    info = captured.graph.info
    assert (info.family, info.vocab_size, info.max_positions) == ("module", VOCAB, CONTEXT)
    assert [node.name for node in captured.graph.inputs()] == ["input_ids", "positions"]
    assert module.training
    assert_equals_eager(captured, module.eval())


@pytest.mark.parametrize(
    ("make", "rows"),
    quick_sample([(make, rows) for make in DECODERS for rows in (1, 2)], [(sdpa_decoder, 2)]),
)
def test_program_equals_eager(make: Callable[[], PlainDecoder], rows: int) -> None:
    module = make()
    sizes = {1: Dim.DYNAMIC} if rows == 1 else {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    ids = torch.zeros(rows, 9, dtype=torch.int64)
    program = export(module, (ids,), dynamic_shapes=(sizes,))
    captured = capture(program, BuildOptions())
    assert (captured.graph.info.vocab_size, captured.graph.info.max_positions) == (VOCAB, CONTEXT)
    assert_equals_eager(captured, module)


def test_ties_masks_and_lines_are_kept() -> None:
    graph = capture(eager_decoder(), BuildOptions()).graph
    tables = [name for name, recipe in graph.weights.items() if recipe == Stored("wte.weight", torch.float32)]
    assert tables == ["wte_weight"]
    assert "lm_head_weight" not in graph.weights
    mask = graph.weights["blocks_1_attn_bias"]
    assert isinstance(mask, Constant)
    assert torch.equal(mask.value, torch.tril(torch.ones(CONTEXT, CONTEXT))[None, None])
    (first, _) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.masked_fill.Scalar)
    assert "self.bias[:, :, :t, :t] == 0" in first.meta["stack_trace"].splitlines()[-1]


def test_bfloat16_is_what_module_to_gives() -> None:
    module = eager_decoder()
    captured = capture(module, BuildOptions(dtype="bfloat16"))
    assert captured.graph.info.dtype == torch.bfloat16
    assert next(module.parameters()).dtype == torch.float32
    tokens = tiny_tokens(9, VOCAB)
    with torch.no_grad():
        expected = eager_decoder().to(torch.bfloat16)(torch.tensor([tokens]))[0][0]
    torch.testing.assert_close(run_captured(captured, tokens), expected, atol=0.05, rtol=0)


class Wrong(nn.Module):
    """A decoder-shaped module to break: embeds, calls `change`, and projects."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 8)
        self.head = nn.Linear(8, VOCAB)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, ids: Tensor) -> Any:
        """ids: [1, tokens]."""
        return self.head(self.change(self.table(ids)))

    def change(self, x: Tensor) -> Tensor:
        """What a subclass does wrong."""
        return x


class BranchesOnValues(Wrong):
    def change(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class DependsOnValues(Wrong):
    def change(self, x: Tensor) -> Tensor:
        return x[:, : int(x.argmax())]


class KeepsTheLarge(Wrong):
    def forward(self, ids: Tensor) -> Any:
        x = self.table(ids)
        return self.head(x + x[0][x[0, :, 0] > 0].sum(0))


class FixesTheLength(Wrong):
    def change(self, x: Tensor) -> Tensor:
        return x + torch.ones(int(x.shape[1]), 8)


class GoesAnotherWay(Wrong):
    def change(self, x: Tensor) -> Tensor:
        return x.cumsum(1) if x.shape[1] >= 5 else x


class Misfits(Wrong):
    def change(self, x: Tensor) -> Tensor:
        return x @ torch.ones(9, 9)


class CountsCalls(Wrong):
    steps: Tensor

    def change(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x


class LastOnly(Wrong):
    def change(self, x: Tensor) -> Tensor:
        return x[:, [-1], :]


class ReturnsNothing(Wrong):
    def forward(self, ids: Tensor) -> Any:
        return None


class ReturnsIds(Wrong):
    def forward(self, ids: Tensor) -> Any:
        return self.head(self.table(ids)).argmax(-1)


class NeedsMore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, VOCAB)

    def forward(self, ids: Tensor, extra: Tensor) -> Any:
        return self.head(extra)


@pytest.mark.parametrize(
    ("wrong", "problem", "line"),
    [
        (BranchesOnValues, "depends on tensor values", "if x.sum() > 0:"),
        (DependsOnValues, "depends on tensor values", "int(x.argmax())"),
        (FixesTheLength, "fixes the number of tokens", "int(x.shape[1])"),
        (GoesAnotherWay, "takes another branch for fewer than 5 tokens", None),
        (Misfits, "could not be traced: RuntimeError", "x @ torch.ones(9, 9)"),
        (CountsCalls, "forward changes .*steps", None),
        (LastOnly, r"returns logits of 1 position\(s\), not of every token", "self.head("),
        (ReturnsNothing, "ReturnsNothing.forward returns a NoneType", None),
        (ReturnsIds, "torch.int64, which cannot be logits", None),
        (NeedsMore, "could not be traced: TypeError: .*extra", None),
    ],
)
def test_failures_name_the_users_line(wrong: type[nn.Module], problem: str, line: str | None) -> None:
    with pytest.raises(CaptureError, match=problem) as error:
        capture(wrong(), BuildOptions())
    assert error.value.fix is not None
    if line is not None:
        assert error.value.at is not None
        file, number = error.value.at.split(":")[:2]
        assert Path(file) == Path(__file__)
        assert line in Path(__file__).read_text().splitlines()[int(number) - 1]


def test_a_size_that_tensor_values_say_is_named_with_its_op_and_line() -> None:
    with pytest.raises(CaptureError, match=r"aten\.\w+\.\w+ makes a tensor .* depends on tensor values") as error:
        capture(KeepsTheLarge(), BuildOptions())
    assert "test_capture_module.py" in str(error.value.at)
    assert "x[0][x[0, :, 0] > 0]" in str(error.value.at)
    assert "llmc models" in str(error.value.fix)


def test_torch_prints_no_graph_beside_the_error(capfd: pytest.CaptureFixture[str]) -> None:
    with logged_text("torch") as log:
        for wrong in (BranchesOnValues, DependsOnValues):
            with pytest.raises(CaptureError, match="depends on tensor values"):
                capture(wrong(), BuildOptions())
    assert capfd.readouterr().err == ""
    assert not log.getvalue()


def test_outputs_that_hold_logits() -> None:
    class ReturnsDict(Wrong):
        def forward(self, ids: Tensor) -> Any:
            return {"loss": None, "logits": self.head(self.table(ids))}

    for module in (Wrong(), ReturnsDict()):
        assert capture(module, BuildOptions()).graph.info.vocab_size == VOCAB


def test_modules_and_programs_that_are_no_decoder() -> None:
    with pytest.raises(CaptureError, match="no floating-point parameters"):
        capture(nn.Module(), BuildOptions())
    with pytest.raises(CaptureError, match="cannot compile a int"):
        capture(3, BuildOptions())  # type: ignore[arg-type]  # the wrong type is the point
    fixed = export(sdpa_decoder(), (torch.zeros(1, 9, dtype=torch.int64),))
    with pytest.raises(CaptureError, match="number of tokens is fixed to 9"):
        capture(fixed, BuildOptions())
    linear = export(nn.Linear(4, 4), (torch.zeros(2, 4),))
    with pytest.raises(CaptureError, match=r"takes 1 inputs \(.*\), not one of token ids"):
        capture(linear, BuildOptions())
    dynamic = export(sdpa_decoder(), (torch.zeros(1, 9, dtype=torch.int64),), dynamic_shapes=({1: Dim.DYNAMIC},))
    with pytest.raises(CaptureError, match=r"exported in torch\.float32"):
        capture(dynamic, BuildOptions(dtype="bfloat16"))
