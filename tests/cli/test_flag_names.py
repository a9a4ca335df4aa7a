"""Errors name flags on the command line, and one option may have the names that other tools have for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.cli.cache_dtype import cache_options
from llmc.cli.flag_names import flags_for_keywords
from tests.cli.command import MODEL, assert_user_error, llmc

FLAGS = {"max_model_len": "--max-model-len", "quantize": "--quantize", "disable_passes": "--disable-pass"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("build option 'quantize' cannot be 'x'", "build option --quantize cannot be 'x'"),
        ("quantize=int4-gptq needs activations", "--quantize int4-gptq needs activations"),
        ("disable_passes=('nope',)", "--disable-pass nope"),
        ("lower max_model_len, or more memory", "lower --max-model-len, or more memory"),
        ("build with --max-model-len 8, quantize less", "build with --max-model-len 8, quantize less"),
        ("/data/max_model_len/x and a_max_model_len", "/data/max_model_len/x and a_max_model_len"),
    ],
)
def test_keywords_become_flags(text: str, told: str) -> None:
    assert flags_for_keywords(text, FLAGS) == told


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (("--max-model-len", "0"), "--max-model-len 0"),
        (("--max-num-seqs", "0"), "--max-sequences 0"),
        (("--max-num-batched-tokens", "0"), "--max-batch-tokens 0"),
        (("--kv-cache", "int2"), "--kv-cache-dtype int2"),
        (("--kv-cache-dtype", "int2"), "--kv-cache-dtype int2"),
        (("--disable-pass", "zzz"), "--disable-pass zzz"),
    ],
    ids=" ".join,
)
def test_errors_of_the_command_line_name_flags(arguments: tuple[str, str], flag: str) -> None:
    outcome = llmc("build", MODEL, "-o", "never.llmc", *arguments)
    assert_user_error(outcome, f"at: {flag}")
    assert "_" not in outcome.err.partition("fix:")[0]


def test_a_flag_with_another_name_than_its_keyword_is_named(tmp_path: Path) -> None:
    tier = ("--kv-offloading-size", "1GB", "--kv-offloading-dir", tmp_path)
    outcome = llmc("serve", MODEL, "--no-enable-prefix-caching", *tier)
    assert_user_error(outcome, "or let prefixes be found (--enable-prefix-caching)")


@pytest.mark.parametrize(
    ("asked", "dtype", "codes"),
    [("auto", "auto", "auto"), ("bf16", "bf16", "auto"), ("int8", "auto", "int8"), ("int4:g32", "auto", "int4:g32")],
)
def test_the_cache_option_takes_dtypes_and_codes(asked: str, dtype: str, codes: str) -> None:
    assert cache_options(asked) == {"kv_dtype": dtype, "kv_cache": codes}
