"""Rules that say which weights an option is for: `PATTERN=WHAT`, by the weights' names in the checkpoint."""

from __future__ import annotations

from fnmatch import fnmatchcase


def matches_module(pattern: str, module: str) -> bool:
    """Whether a glob is for a module, such as `model.layers.0.mlp.down_proj`: for its name, or the end of it after a
    dot."""
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"*.{pattern}")


def split_rule(item: str) -> tuple[str | None, str]:
    """(pattern, what): an equals sign before the first colon makes a rule, later ones belong to options."""
    head, equals, rest = item.partition("=")
    return (head, rest) if equals and ":" not in head else (None, item)
