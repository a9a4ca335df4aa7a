"""What transformers' models are refused for: the line of their code, where a hook refuses too, and what can be done."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from llmc.architectures.tiny_config import tiny_architecture
from llmc.errors import CaptureError
from llmc.frontends.capture import capture
from llmc.frontends.tracing.trace_errors import goes_from_token_to_token
from llmc.options import BuildOptions


def refusal(model_type: str) -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        capture(tiny_architecture(model_type), BuildOptions())
    return caught.value


@pytest.mark.parametrize(
    ("model_type", "code"),
    [
        ("doge", "attention_interface("),
        pytest.param("bigbird_pegasus", "attention_interface(", marks=pytest.mark.slow),
        pytest.param("deepseek_v4", "attention_interface(", marks=pytest.mark.slow),
        pytest.param("qwen4_exp_text", "self.indexer(", marks=pytest.mark.slow),
    ],
)
def test_what_a_hook_refuses_names_the_line_that_called_it(model_type: str, code: str) -> None:
    at = str(refusal(model_type).at)
    assert at.startswith("transformers/models/") and code in at


def test_a_fixed_length_is_no_state() -> None:
    error = refusal("cpmant")
    assert "fixes the number of tokens" in error.problem and "modeling_cpmant.py" in str(error.at)
    assert "states" not in str(error.fix) and "llmc models" in str(error.fix)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("hidden_states = hidden_states[:, self.prompt_length :]", False),
        ("ssm_state = ssm_state * dA[:, t] + dBx[:, t]", True),
        ("out = self.chunk_scan(x)", True),
        (None, False),
    ],
)
def test_hidden_states_go_from_layer_to_layer(code: str | None, expected: bool) -> None:
    place = None if code is None else f"transformers/models/state/modeling_state.py:7: {code}"
    assert goes_from_token_to_token(place) is expected


class ChecksValues(nn.Module):
    """As XLM: a size from values, whose bounds are infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(17, 8), nn.Linear(8, 17)

    def forward(self, ids: Tensor) -> Tensor:
        torch._check(ids.max().item() <= ids.shape[1] + 17)
        logits: Tensor = self.head(self.table(ids))
        return logits


def test_a_check_of_values_does_not_end_the_capture() -> None:
    assert capture(ChecksValues().eval(), BuildOptions()).graph.info.vocab_size == 17
