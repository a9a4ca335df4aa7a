"""A scheme or a KV cache that a target has no kernels for is refused before a model is read."""

from __future__ import annotations

import pytest

from llmc.codegen.target_kind import kind_of
from llmc.compiler import build
from llmc.errors import OptionError
from llmc.options import parse_options
from llmc.targets import resolve_target


def _refusal(target: str, **options: str) -> OptionError:
    with pytest.raises(OptionError) as caught:
        kind_of(resolve_target(target)).check(parse_options(options))
    return caught.value


@pytest.mark.parametrize("scheme", ["fp8-w8a8", "fp8-w8a8:static", "down_proj=fp8-w8a8"])
def test_names_the_target_the_reason_and_what_it_runs(scheme: str) -> None:
    error = _refusal("a100", quantize=scheme)
    name = scheme.rpartition("=")[2]
    problem, _, reason = error.problem.partition(": ")
    assert problem == f"a100 cannot run the scheme {name}"
    assert "fp8" in reason
    assert error.at == f"quantize={name}"
    assert error.fix is not None
    runs = error.fix.removeprefix("it runs ").split(", ")
    assert {"int8", "int4-gptq", "w8a8"} <= set(runs)
    assert "fp8-w8a8" not in runs


@pytest.mark.parametrize("target", ["h100", "a100", "mi300x", "cpu-x86-64-v4", "reference"])
@pytest.mark.parametrize("scheme", ["w8a8:x32", "w4a8-gptq:g32:xrow", "q4_k:s288:x32", "q6_k:s320", "auto:4.5"])
def test_every_target_rounds_tokens_by_groups_and_has_super_blocks_of_any_length(target: str, scheme: str) -> None:
    kind_of(resolve_target(target)).check(parse_options({"quantize": scheme, "calibration": "text"}))


@pytest.mark.parametrize("target", ["h100", "cpu-x86-64-v4", "reference"])
def test_targets_that_have_the_kernels_take_it(target: str) -> None:
    kind_of(resolve_target(target)).check(parse_options({"quantize": "fp8-w8a8", "kv_cache": "int8"}))


def test_the_model_is_not_read_first() -> None:
    with pytest.raises(OptionError, match="a100 cannot run the scheme fp8-w8a8"):
        build("no-such-model", "no-such-engine", target="a100", quantize="fp8-w8a8")


@pytest.mark.parametrize(
    ("target", "kv_cache"),
    [("cpu-x86-64-v4", "int8/int4:rotated"), ("cpu", "int8:g16/int8"), ("h100", "fp8/int4"), ("reference", "fp8/int4")],
)
def test_keys_and_values_may_have_different_codes(target: str, kv_cache: str) -> None:
    kind_of(resolve_target(target)).check(parse_options({"kv_cache": kv_cache}))


@pytest.mark.parametrize("kv_cache", ["int4/int8", "fp8/int4"])
def test_pairs_of_codes_without_kernels_are_refused(kv_cache: str) -> None:
    problem = _refusal("cpu-x86-64-v4", kv_cache=kv_cache).problem
    assert problem.endswith("kernels take int8/int4, or one kind of codes")


@pytest.mark.parametrize("target", ["cpu-x86-64-v4", "a100", "h100", "reference"])
def test_newest_rows_may_stay_exact(target: str) -> None:
    kind_of(resolve_target(target)).check(parse_options({"kv_cache": "int4:rotated:recent=128"}))


def test_a_cache_without_codes_is_offered_where_codes_have_no_kernels() -> None:
    fix = "build with kv_cache=auto, or with target reference"
    assert _refusal("cpu-x86-64-v4", kv_cache="fp8/int4:recent=16").fix == fix
