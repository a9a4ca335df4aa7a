"""What a config.json says of codes, scheme by scheme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.quantization_config import StoredScheme, stored_schemes

FILE = Path("config.json")
GPTQ, AWQ = ("qweight", "qzeros", "scales"), ("qweight", "scales")


def scheme(**config: Any) -> StoredScheme:
    (group,) = stored_schemes({"quantization_config": config}, FILE)
    return group.scheme


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4}, StoredScheme("gptq", "int4", GPTQ, ("g_idx",), 1)),
        (
            {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq"},
            StoredScheme("gptq", "int8", GPTQ, ("g_idx",), 1),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
            StoredScheme("gptq", "int4", GPTQ, ("g_idx",), 0),
        ),
        ({"quant_method": "awq", "bits": 4}, StoredScheme("awq", "int4", (*AWQ, "qzeros"), ("qzeros",))),
        ({"quant_method": "awq", "w_bit": 4, "zero_point": False}, StoredScheme("awq", "int4", AWQ, ("qzeros",))),
    ],
)
def test_each_version_is_its_scheme(config: dict[str, Any], expected: StoredScheme) -> None:
    assert scheme(**config) == expected


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ's checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "bits": 8}, "AWQ with 8 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ with 4 bits in version 'gemv'"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors without config_groups"),
        ({"quant_method": "hqq"}, "quantized by 'hqq'"),
    ],
)
def test_what_is_not_read_is_named(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem) as caught:
        scheme(**config)
    assert caught.value.at == str(FILE) and caught.value.fix
