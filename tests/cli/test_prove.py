"""`llmc prove` as a user sees it: the table, the JSON, the exit code, and names that do not exist."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.command import assert_user_error, llmc

FAULTS = Path(__file__).parent.parent / "debug" / "planted_faults.py"


def test_a_right_pass() -> None:
    outcome = llmc("prove", "fuse_silu", "cast_kv_cache")
    assert outcome.code == 0, outcome.err
    rows = [line.split() for line in outcome.out.splitlines() if "fuse_silu" in line or "cast_kv" in line]
    assert [row[3] for row in rows] == ["proved", "skipped"]


def test_a_wrong_pass_of_ones_own() -> None:
    outcome = llmc("prove", "--passes-from", f"{FAULTS}:wrong_epsilon", "--json")
    assert outcome.code == 1, outcome.err
    (verdict,) = json.loads(outcome.out)
    assert verdict["outcome"] == "disproved"
    assert verdict["counterexample"]["before"] != verdict["counterexample"]["after"]


def test_a_name_that_no_pass_has() -> None:
    outcome = llmc("prove", "fuse_silly")
    assert_user_error(outcome, "there is no pass 'fuse_silly'")
