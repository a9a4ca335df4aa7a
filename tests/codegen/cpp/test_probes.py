"""The machine probes measure something plausible, of every kind of launch that a program has."""

from __future__ import annotations

import re
from math import isfinite
from pathlib import Path

import pytest

from llmc.codegen.cpp.kernel_api import kernel_include_dir
from llmc.codegen.cpp.kernel_library import function_name
from llmc.codegen.cpp.measured_rates import measured_rates
from llmc.codegen.cpp.probes import largest_cache_bytes, multiply_rate, read_bandwidth
from llmc.errors import LlmcError
from llmc.prediction.launch_cost import ATTENTION_KEYS
from llmc.program import Affine, CacheSlot, Launch, Limits, Origin, Program
from llmc.program.launch_arguments import Argument, Count
from llmc.targets import host_target

Arguments = dict[str, Argument]
PRODUCT: Arguments = {"in": 64, "out": 32, "tokens": Count.TOKENS}
CODES: Arguments = {"format": "int4", "x_format": "none", "has_zeros": True, "group": 32, "scale_type": "bf16"}
ATTENTION: Arguments = {"heads": 8, "kv_heads": 2, "head_dim": 32, "latent": 0}


def program(launches: dict[tuple[str, ...], Arguments], cache: CacheSlot) -> Program:
    made = tuple(
        Launch(function_name(family, dtypes), family, tuple(dtypes), arguments, Origin((), None, None), "1", "1")
        for (family, *dtypes), arguments in launches.items()
    )
    return Program(Limits(16, 4, 4, 32, 8), 10, Affine(), Affine(), (), (), (cache,), made)


def test_read_bandwidth_is_that_of_some_memory() -> None:
    assert 1e8 < read_bandwidth(host_target(), 2, megabytes=16) < 1e13


def test_the_largest_cache_is_found(tmp_path: Path) -> None:
    assert largest_cache_bytes(tmp_path) == 0
    for index, size in enumerate(("48K", "2048K", "307200K", "32K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert largest_cache_bytes(tmp_path) == 300 << 20


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
            {
                ("linear", "BF16"): PRODUCT,
                ("paged_attention", "BF16", "BF16"): ATTENTION,
                ("rms_norm", "BF16"): {},
                ("embedding_panels", "BF16"): {"tokens": Count.TOKENS, "channels": 64},
            },
            CacheSlot(2, 32, 32, "BF16"),
            {"F32", "BF16", "attention bf16·bf16", "lookup"},
        ),
        (
            {
                ("quantized_linear", "BF16"): {**PRODUCT, **CODES},
                ("quantized_lm_head", "BF16"): {**PRODUCT, **CODES, "format": "int8", "x_format": "int8", "group": 64},
                ("paged_attention", "BF16", "int4"): ATTENTION,
            },
            CacheSlot(2, 32, 32, "U8", "int4"),
            {"F32", "int4:asym·BF16", "int8:asym·int8", "attention bf16·int4"},
        ),
        (
            {("paged_attention", "BF16", "BF16"): {**ATTENTION, "heads": 32, "kv_heads": 32, "head_dim": 128}},
            CacheSlot(32, 128, 128, "BF16"),
            {"F32", "attention bf16·bf16"},
        ),
    ],
    ids=["plain", "codes", "a block of keys larger than a cache"],
)
def test_rates_are_those_of_some_machine(
    launches: dict[tuple[str, ...], Arguments], cache: CacheSlot, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether operands are read from memory or from a large cache, which takes a fraction of the time."""
    monkeypatch.setattr("llmc.codegen.cpp.measured_rates._MEMORY_BYTES", 32 << 20)
    rates = measured_rates(host_target(), 1, program(launches, cache))
    assert rates.measured and 1e8 < rates.bandwidth < 1e13 and 0 <= rates.launch < 10
    assert set(rates.kinds) == kinds
    for name, kind in rates.kinds.items():
        assert 1e7 < kind.multiply < 1e13
        assert kind.serial >= 0 and isfinite(kind.serial)
        is_product = "F32" not in name and name != "lookup" and not name.startswith("attention")
        assert (kind.pack is not None) is is_product
        assert bool(kind.reach) is (is_product or name.startswith("attention"))
        assert all(0 < reached.share <= 1 for reached in kind.reach)
        assert [reached.rows for reached in kind.reach] == sorted(other.rows for other in kind.reach)
        assert (kind.bandwidth is not None) is (name == "lookup")


def test_attention_takes_as_many_keys_at_a_time_as_the_kernels_say() -> None:
    source = (kernel_include_dir() / "attention_products.h").read_text()
    assert re.findall(r"kAttentionKeys = (\d+);", source) == [str(ATTENTION_KEYS)]
