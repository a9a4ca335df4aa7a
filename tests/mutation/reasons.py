"""Why some survivors stay: what reasons.toml says of a mutant, found by its lines."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path


def reason_of(file: str, diff: str) -> str | None:
    """diff: the lines that a mutant takes away, and those that it puts there."""
    return reasons().get((file, *(_side(diff, sign) for sign in "-+")))


@cache
def reasons() -> dict[tuple[str, ...], str]:
    """By file, lines before and lines after."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {
        (survivor["file"], *("\n".join(survivor[side]) for side in ("before", "after"))): survivor["reason"]
        for survivor in tomllib.loads(text)["survivor"]
    }


def _side(diff: str, sign: str) -> str:
    return "\n".join(line[1:].strip() for line in diff.splitlines() if line.startswith(sign))
