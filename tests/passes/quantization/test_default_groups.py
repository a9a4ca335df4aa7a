"""A scheme that names no group takes the largest that divides a weight's columns; one that it names must divide."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.errors import OptionError
from llmc.formats.scheme_text import parse_scheme
from llmc.formats.schemes import SCHEMES
from tests.passes.quantization.quantizing import calibration_file, logits, odd_llama, quantized
from tests.quick_sample import quick_sample

# The groups that most schemes take for the widths of `odd_llama`.
_GROUPS = {"q_proj": 64, "o_proj": 128, "down_proj": 128}
# And how many columns share a float where scales have steps.
_RUNS = {"q_proj": 288, "o_proj": 256, "down_proj": 448}


@pytest.mark.parametrize("name", quick_sample(SCHEMES, ("int4", "q4_k")))
def test_every_scheme_fits_odd_widths(name: str, tmp_path: Path) -> None:
    captured = odd_llama()
    result = quantized(name, captured=captured, calibration=calibration_file(tmp_path, tokens=512))
    schemes = {weight.module.rpartition(".")[2]: weight.scheme for weight in result.graph.quantized}
    plain = SCHEMES[name]
    for module, group in _GROUPS.items():
        taken = min(group, plain.columns or group)
        suffix = "" if plain.columns in (None, taken) else f":g{taken}"
        if plain.codes.steps is not None:
            suffix = "" if _RUNS[module] == 256 else f":s{_RUNS[module]}"
        tokens = ":x32" if plain.activation == "int8" else ""
        assert schemes[module] == f"{name}{tokens}{suffix}"
    expected, actual = logits(captured.graph, captured), logits(result.graph, captured)
    assert 0 < float((actual - expected).square().mean().sqrt() / expected.std()) < (0.25 if plain.code_bits > 3 else 1)


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.granularity == "group"])
@pytest.mark.parametrize("columns, largest", [(576, 64), (512, 128), (896, 128), (96, 32), (80, None)])
def test_the_largest_group_that_divides(name: str, columns: int, largest: int | None) -> None:
    plain = SCHEMES[name]
    fitted = plain.fitted(columns)
    if largest is None:
        assert fitted is None
        return
    assert fitted is not None
    assert fitted.group == min(largest, plain.group or largest)
    assert parse_scheme(fitted.name) == fitted or fitted == plain


def test_a_named_super_block_must_divide() -> None:
    with pytest.raises(OptionError, match=r"576 columns, which super-blocks of 256 do not divide") as caught:
        quantized("q4_k:s256:xnone", captured=odd_llama())
    assert caught.value.fix is not None and caught.value.fix.endswith("q_proj=q4_k:xnone")


@pytest.mark.parametrize("scheme", ["int4:g128", "w4a8-gptq:g128", "nf4:g128", "int5-awq:g128:sym"])
def test_a_named_group_must_divide(scheme: str, tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"q_proj.weight has 576 columns, which groups of 128 do not divide"
    ) as caught:
        quantized(scheme, captured=odd_llama(), calibration=calibration_file(tmp_path, tokens=512))
    name, _, *rest = scheme.split(":")
    assert caught.value.fix is not None
    assert caught.value.fix.endswith(f"q_proj={':'.join([name, *rest])}:g64")
