"""The LLMC_* environment variables: defaults, values, and what a mistake says."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.errors import OptionError
from llmc.settings import CaptureCache, read_settings


def test_unset_variables_have_defaults() -> None:
    settings = read_settings({"HOME": "/h"})
    assert settings.cache_dir == Path("~/.cache/llmc").expanduser()
    assert settings.debug is False and settings.threads is None
    assert read_settings({"XDG_CACHE_HOME": "/x"}).cache_dir == Path("/x/llmc")
    assert read_settings({"LLMC_THREADS": "", "LLMC_CACHE_DIR": ""}) == settings


def test_variables_are_read() -> None:
    settings = read_settings({"LLMC_CACHE_DIR": "/c", "LLMC_DEBUG": "1", "LLMC_THREADS": "3"})
    assert settings.capture_cache is CaptureCache.CLEAN
    for value, meant in (("0", CaptureCache.OFF), ("1", CaptureCache.CLEAN), ("always", CaptureCache.ALWAYS)):
        assert read_settings({"LLMC_CAPTURE_CACHE": value}).capture_cache is meant
    assert not settings.run_ahead and not read_settings({"LLMC_RUN_AHEAD": "0"}).run_ahead
    assert read_settings({"LLMC_RUN_AHEAD": "1"}).run_ahead
    assert not settings.prompt_graphs and read_settings({"LLMC_PROMPT_GRAPHS": "1"}).prompt_graphs
    assert settings.rank_devices is None
    assert read_settings({"LLMC_RANK_DEVICES": "0,0,12"}).rank_devices == (0, 0, 12)
    assert (settings.cache_dir, settings.debug, settings.threads) == (Path("/c"), True, 3)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("", None), ("0", 0), ("1000", 1000), ("20GiB", 20 << 30), ("500 MiB", 500 << 20), ("3g", 3 * 10**9), ("7B", 7)],
)
def test_sizes_have_units(text: str, nbytes: int | None) -> None:
    assert read_settings({"LLMC_CACHE_SIZE": text}).cache_bytes == nbytes


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("LLMC_THREADS", "0", "LLMC_THREADS cannot be '0'"),
        ("LLMC_THREADS", "two", "LLMC_THREADS cannot be 'two'"),
        ("LLMC_DEBUG", "yes", "set it to 0 or 1"),
        ("LLMC_DEBUG", "always", "set it to 0 or 1"),
        ("LLMC_RUN_AHEAD", "no", "set it to 0 or 1"),
        ("LLMC_PROMPT_GRAPHS", "2", "set it to 0 or 1"),
        ("LLMC_CAPTURE_CACHE", "off", "set it to 0, 1 or always"),
        ("LLMC_CACHE_SIZE", "much", "LLMC_CACHE_SIZE cannot be 'much'"),
        ("LLMC_RANK_DEVICES", "0;1", "give a GPU for each rank, such as 0,1,0,1"),
        ("LLMC_RANK_DEVICES", "cuda:0", "LLMC_RANK_DEVICES cannot be 'cuda:0'"),
        ("LLMC_CACHE_SIZE", "-1", "give a size such as 20GB"),
        ("LLMC_CACHEDIR", "/c", "did you mean LLMC_CACHE_DIR"),
    ],
)
def test_mistakes_are_named(name: str, value: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        read_settings({name: value})
