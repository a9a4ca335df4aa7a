"""The machine probes measure something plausible, of every kind of launch that a program has."""

from __future__ import annotations

import re
from math import isfinite

import pytest

from llmc.codegen.cpp.kernel_library import kernel_include_dir
from llmc.codegen.cpp.measured_rates import measured_rates
from llmc.codegen.cpp.probe_operands import Product
from llmc.codegen.cpp.probes import multiply_rate, read_bandwidth
from llmc.errors import LlmcError
from llmc.program import Affine, CacheSlot, Launch, Limits, Origin, Program
from llmc.targets import CPU_TARGETS, host_target

PRODUCT = {"in": 64, "out": 32, "tokens": "T"}
CODES = {"format": "int4", "x_format": "none", "has_zeros": True, "group": 32, "scale_type": "bf16"}
ATTENTION = {"heads": 8, "kv_heads": 2}


def program(launches: dict[str, dict[str, str | int | float | bool | None]], cache: CacheSlot) -> Program:
    made = tuple(Launch(name, arguments, Origin((), None, None), "1", "1") for name, arguments in launches.items())
    return Program(Limits(16, 4, 4, 32, 8), 10, Affine(), Affine(), (), (), (cache,), made)


def test_read_bandwidth_is_that_of_some_memory() -> None:
    assert 1e8 < read_bandwidth(host_target(), 2, megabytes=16) < 1e13


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_multiply_rate_is_that_of_some_processor(dtype: str) -> None:
    rate = multiply_rate(host_target(), 1, "f32" if dtype == "f32" else "bf16")
    assert 1e8 < rate < 1e13


def test_threads_that_cannot_be_had_are_an_error() -> None:
    with pytest.raises(LlmcError, match="threads cannot be started"):
        read_bandwidth(host_target(), 2_000_000_000, megabytes=1)


@pytest.mark.parametrize(
    ("launches", "cache", "kinds"),
    [
        (
            {"llmc_linear_bf16": PRODUCT, "llmc_paged_attention_bf16_bf16": ATTENTION, "llmc_rms_norm_bf16": {}},
            CacheSlot(2, 32, 32, "BF16"),
            {"F32", "BF16", "attention bf16·bf16"},
        ),
        (
            {
                "llmc_quantized_linear_bf16": {**PRODUCT, **CODES},
                "llmc_quantized_lm_head_bf16": {**PRODUCT, **CODES, "format": "int8", "x_format": "int8", "group": 64},
                "llmc_paged_attention_bf16_int4": ATTENTION,
            },
            CacheSlot(2, 32, 32, "U8", "int4"),
            {"F32", "int4:asym·BF16", "int8:asym·int8", "attention bf16·int4"},
        ),
    ],
    ids=["plain", "codes"],
)
def test_rates_are_those_of_some_machine(
    launches: dict[str, dict[str, str | int | float | bool | None]], cache: CacheSlot, kinds: set[str]
) -> None:
    rates = measured_rates(host_target(), 1, program(launches, cache))
    assert rates.measured and 1e8 < rates.bandwidth < 1e13 and 0 <= rates.launch < 1e-2
    assert set(rates.kinds) == kinds
    for name, kind in rates.kinds.items():
        assert 1e7 < kind.multiply < 1e13
        assert kind.unpack is None or kind.unpack > 1e6
        assert kind.serial >= 0 and isfinite(kind.serial)
        is_product = name != "F32" and not name.startswith("attention")
        assert (kind.pack is not None) is is_product


def test_tiles_are_as_tall_as_the_kernels_say() -> None:
    sources = {name: (kernel_include_dir() / name).read_text() for name in ("panel_product.h", "code_products.h")}
    plain = re.findall(r"kTokens = (.*?)[,;]", sources["panel_product.h"])
    assert plain == [
        "kTileTokens",
        "14",
        "kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4",
        "kLanes == 16 ? 14 : kLanes == 8 ? 6 : 4",
    ]
    assert re.findall(r"kCodeTokens = (.*?);", sources["code_products.h"]) == ["kLanes == 16 ? 8 : 4"]
    registers = (kernel_include_dir() / "tile_registers.h").read_text()
    assert "kTileTokens = 2 * kTileRows" in registers and "kTileRows = 16" in registers
    products = (Product("bf16"), Product("f32"), Product("bf16", "int4"), Product("bf16", "int4", x_format="int8"))
    tiles = {t.name: [product.tile(t) for product in products] for t in CPU_TARGETS}
    assert tiles == {
        "cpu-x86-64-v4-amx": [32, 14, 8, 32],
        "cpu-x86-64-v4-bf16": [14, 14, 8, 8],
        "cpu-x86-64-v4": [12, 14, 8, 8],
        "cpu-x86-64-v3": [6, 6, 4, 4],
        "cpu-portable": [4, 4, 4, 4],
    }
