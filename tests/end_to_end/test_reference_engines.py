"""Reference engines hold weights of every type that a module can have, and compute what it or its export does."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import llmc
from llmc.errors import OptionError
from tests.end_to_end.logits import assert_close, random_tokens, torch_logits
from tests.plain_modules import sdpa_decoder


class Levels(nn.Module):
    """Channels times whole numbers, some of them left out: buffers of int64 and bool."""

    levels: Tensor
    kept: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("levels", torch.arange(width) % 3 + 1)
        self.register_buffer("kept", torch.arange(width) % 5 != 0)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width]."""
        return torch.where(self.kept, x * self.levels, 0.0)


def test_integer_and_boolean_buffers() -> None:
    model = sdpa_decoder()
    model.blocks.append(Levels(model.ln_f.normalized_shape[0]))
    with llmc.compile(model, target="reference") as engine:
        program = json.loads((engine.path / "program.json").read_text(encoding="utf-8"))
        assert {weight["dtype"] for weight in program["weights"]} == {"F32", "I64", "BOOL"}
        tokens = random_tokens(engine.info.vocab_size, 9)
        assert_close(engine.logits(tokens), torch_logits(model, tokens))


def test_an_exported_program() -> None:
    model = sdpa_decoder()
    program = export(model, (torch.zeros(1, 9, dtype=torch.int64),), dynamic_shapes=({1: Dim.DYNAMIC},))
    with llmc.compile(program, target="reference", dtype="float32") as engine:
        for length in (1, 21):
            tokens = random_tokens(engine.info.vocab_size, length)
            assert_close(engine.logits(tokens), torch_logits(model, tokens))


def test_an_unknown_option_names_the_one_that_was_meant() -> None:
    with pytest.raises(OptionError, match="unknown build option 'dytpe'") as caught:
        llmc.compile(sdpa_decoder(), target="reference", dytpe="float32")  # type: ignore[call-arg]
    assert caught.value.fix == "did you mean 'dtype'?"
