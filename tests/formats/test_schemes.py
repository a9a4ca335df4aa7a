"""What `--quantize` spells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmc.codegen.cpp.pack_codes import CodeShape
from llmc.errors import OptionError
from llmc.formats.code_format import CODE_FORMATS
from llmc.formats.scheme_text import parse_quantization, parse_scheme
from llmc.formats.schemes import SCHEMES, TokenDefault, on_target
from llmc.options import parse_options
from llmc.passes.quantization.round_weight import round_to_nearest
from llmc.program import Layout


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
        ("q4_k", 4.5),
        ("q4_k:s128", 4.625),
        ("q4_1", 5.0),
        ("q5_k", 5.5),
        ("q6_k", 6.5625),
        ("iq4_nl", 4.5),
        ("iq4_xs", 4.25),
        ("q3_k", 3.4375),
    ],
)
def test_bits_count_scales_and_zeros(spelled: str, bits: float) -> None:
    scheme = parse_scheme(spelled)
    assert scheme is not None
    assert scheme.bits(256) == pytest.approx(bits)
    if scheme.symmetric and not scheme.codes.is_blocked:
        rounded = round_to_nearest(torch.ones(256, 256), scheme)
        assert scheme.bits(256) == scheme.code_bits + 8 * rounded.scales.nbytes / 256**2


@pytest.mark.parametrize("format", [name for name, codes in CODE_FORMATS.items() if codes.is_blocked])
@pytest.mark.parametrize("columns", [576, 512, 896, 640, 928, 32])
def test_bits_of_blocked_formats_are_what_panels_take(format: str, columns: int) -> None:
    scheme = SCHEMES[format].fitted(columns)
    assert scheme is not None
    run = scheme.run_of(columns)
    assert run is not None
    shape = CodeShape((64, columns), columns // run, format, torch.bfloat16, has_zeros=False)
    assert shape.nbytes(Layout.CODE_PANELS) * 8 == pytest.approx(scheme.bits(columns) * 64 * columns)
    assert columns < 256 or scheme.bits(columns) <= scheme.bits(256) + 0.03
    assert parse_scheme(scheme.name) == scheme


def test_tokens_beside_blocked_formats_follow_the_target_unless_named() -> None:
    for name, on_cpu, elsewhere in (
        ("q4_k", ("int8", 32), ("none", None)),
        ("q6_k-gptq:xnone", ("none", None), ("none", None)),
        ("iq4_nl:xrow", ("int8", None), ("int8", None)),
        ("q5_k:x32", ("int8", 32), ("int8", 32)),
        ("int4", ("none", None), ("none", None)),
    ):
        for token_group, expected in ((32, on_cpu), (None, elsewhere)):
            asked = on_target(
                parse_quantization((name, f"lm_head={name}")), TokenDefault(token_group, rounds_plain=True)
            )
            assert [(scheme.activation, scheme.token_group) for scheme in asked.schemes] == [expected] * 2


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
        ("mxfp4:x32", "mxfp4 has no option 'x32'", "mxfp4 takes no options"),
        ("Q4_K", "unknown quantization scheme 'Q4_K'", "did you mean 'q4_k'?"),
        ("w4a8:x32:xrow", "x32 and xrow are two options for the same thing", "leave out x32, or xrow"),
        ("q4_k:s256:s288", "s256 and s288 are two options", "leave out s256, or s288"),
        ("int4:g64:g128", "g64 and g128 are two options", "leave out g64, or g128"),
        ("w8a8:static:dynamic", "static and dynamic are two options", "leave out static"),
        ("q4_k:asym", "q4_k has no option 'asym'", "s256"),
        ("q4_k:g64", "q4_k has no option 'g64'", "x32, xrow, xnone"),
        ("q4_k:s48", "q4_k has no option 's48'", "multiple of"),
        ("q4_k:s0", "q4_k has no option 's0'", "multiple of"),
        ("iq4_nl:s256", "iq4_nl has no option 's256'", "xnone"),
        ("int4:xnone", "int4 has no option 'xnone'", "g32"),
        ("q4_k-awq", "unknown quantization scheme 'q4_k-awq'", "q4_k-gptq"),
        ("int4,w8a8", "two schemes for all weights", "lm_head=w8a8"),
        ("auto", "no budget of bits", "auto:4.5"),
        ("auto:3", "no budget of bits", "4.125"),
        ("auto:4", "no budget of bits", "4.125"),
        ("auto:16.1", "no budget of bits", "auto:4.5"),
        ("int4-gptq:damp=2", "'2' is not a number from 0.0 to 1.0", "0.5"),
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
