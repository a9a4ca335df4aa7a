"""What the tables of a build say of weights."""

from __future__ import annotations

from llmc.cli.weight_tables import quantization_table
from llmc.formats.quantized_weight import QuantizedWeight
from tests.cli.test_table import printed


def test_errors_say_what_they_are_of() -> None:
    stored = QuantizedWeight("q_proj", "int4-gptq", 8, 32, 4.5, None, False, None)
    of_output = QuantizedWeight("up_proj", "w4a8", 8, 96, 4.125, 0.0125, True, None)
    of_weight = QuantizedWeight("lm_head", "int8", 8, 32, 8.0, 0.005, False, "it decides")
    text = printed(quantization_table((stored, of_output, of_weight)), 120)
    q_proj, up_proj, lm_head = (
        next(line for line in text.splitlines() if name in line) for name in ("q_proj", "up_proj", "lm_head")
    )
    assert "as stored" in q_proj and "1.25%" in up_proj and "it decides" in lm_head
    assert "0.50% (weight)" in lm_head and "(weight)" not in up_proj
    assert "4.975 bits on average" in text and "output error" in text
