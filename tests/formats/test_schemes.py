"""What `--quantize` spells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmc.errors import OptionError
from llmc.formats.schemes import parse_quantization, parse_scheme
from llmc.options import parse_options
from llmc.passes.quantization.round_weight import round_to_nearest


def test_reads_options_of_a_scheme() -> None:
    scheme = parse_scheme("int4-gptq:g64:asym:damp=0.05:noactorder")
    assert scheme is not None
    assert (scheme.method, scheme.group, scheme.symmetric, scheme.damping, scheme.act_order) == (
        "gptq",
        64,
        False,
        0.05,
        False,
    )
    assert scheme.needs_calibration
    assert parse_scheme("none") is None


def test_the_last_rule_that_matches_counts() -> None:
    quantization = parse_quantization(("int4", "*.down_proj=int8", "model.layers.0.*=none"))
    rule = quantization.rule_for("model.layers.0.mlp.down_proj")
    assert rule is not None
    assert rule.scheme is None
    other = quantization.rule_for("model.layers.1.mlp.down_proj")
    assert other is not None
    assert other.scheme is not None
    assert other.scheme.name == "int8"
    assert quantization.rule_for("model.layers.1.mlp.up_proj") is None


def test_a_rule_may_name_the_end_of_a_module() -> None:
    quantization = parse_quantization(("down_proj=w8a8-smoothquant:alpha=0.8",))
    rule = quantization.rule_for("model.layers.0.mlp.down_proj")
    assert rule is not None
    assert rule.scheme is not None
    assert rule.scheme.alpha == 0.8
    assert quantization.default is None


def test_commas_separate_items_of_the_option() -> None:
    options = parse_options({"quantize": "int4-gptq:g64, lm_head=int8"})
    assert options.quantize == ("int4-gptq:g64", "lm_head=int8")


@pytest.mark.parametrize(
    ("spelled", "bits"),
    [
        ("int4", 4.125),
        ("int4:asym", 4.15625),
        ("int4:g32", 4.5),
        ("nf4", 4.25),
        ("mxfp4", 4.5),
        ("fp8", 8.125),
        # Scales that rows share are stored with each of them.
        ("fp8:tensor", 8.125),
        ("fp8:block", 8.125),
    ],
)
def test_bits_count_scales_and_zeros(spelled: str, bits: float) -> None:
    scheme = parse_scheme(spelled)
    assert scheme is not None
    assert scheme.bits(256) == pytest.approx(bits)
    if scheme.symmetric:
        rounded = round_to_nearest(torch.ones(256, 256), scheme)
        assert scheme.bits(256) == scheme.code_bits + 8 * rounded.scales.nbytes / 256**2


def test_calibration_may_be_a_path() -> None:
    assert parse_options({"calibration": Path("text.txt")}).calibration == "text.txt"
    assert parse_options({"calibration": "text.txt"}) == parse_options({"calibration": Path("text.txt")})
    with pytest.raises(OptionError, match="'calibration' cannot be 3"):
        parse_options({"calibration": 3})


@pytest.mark.parametrize(
    ("spelled", "problem", "fix"),
    [
        ("int3", "unknown quantization scheme 'int3'", "known: int8"),
        ("int4-gtpq", "unknown quantization scheme", "did you mean 'int4-gptq'?"),
        ("int4:g48", "int4 has no option 'g48'", "g32, g64, g128"),
        ("nf4:asym", "nf4 has no option 'asym'", "g32"),
        ("int4,w8a8", "two schemes for everything", "lm_head=w8a8"),
        ("auto", "no budget of bits", "auto:4.5"),
        ("auto:3", "no budget of bits", "4.125"),
        ("auto:4", "no budget of bits", "4.125"),
        ("auto:16.1", "no budget of bits", "auto:4.5"),
        ("int4-gptq:damp=2", "'2' is no number from 0.0 to 1.0", "0.5"),
        ("lm_head=int9", "unknown quantization scheme 'int9'", "known"),
    ],
)
def test_errors_say_what_is_known(spelled: str, problem: str, fix: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options({"quantize": spelled})
    assert problem in caught.value.problem
    assert caught.value.fix is not None
    assert fix in caught.value.fix


def test_budgets_are_above_4_bits_and_up_to_16() -> None:
    for text, bits in (("auto:4.01", 4.01), ("auto:16", 16.0)):
        budget = parse_quantization([text]).budget
        assert budget is not None and budget.bits == bits
