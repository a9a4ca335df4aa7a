"""Replace the Python keywords in the library's error messages by the flags of the verb."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmc.errors import LlmcError

# Keywords whose flags have other names.
_RENAMED = {
    "disable_passes": "disable_pass",
    "kv_dtype": "kv_cache_dtype",
    "kv_cache": "kv_cache_dtype",
    "speculation": "speculative_config",
    "api_keys": "api_key",
    "prefix_cache": "enable_prefix_caching",
}
_VALUE = r"(?:\('(?P<only>[^']*)',\)|'(?P<quoted>[^']*)'|(?P<bare>[^\s,;)]*))"


def flags_of(command: Any) -> dict[str, str]:
    """The flags of a command and its subcommands, by Python keyword."""
    by_keyword: dict[str, str] = {}
    for subcommand in getattr(command, "commands", {}).values():
        by_keyword |= flags_of(subcommand)
    for parameter in command.params:
        flags = [flag for flag in parameter.opts if flag.startswith("--")]
        if parameter.param_type_name == "option" and flags:
            by_keyword[parameter.name] = flags[0]
    return by_keyword | {keyword: by_keyword[name] for keyword, name in _RENAMED.items() if name in by_keyword}


def with_flags(error: LlmcError, flags: Mapping[str, str]) -> LlmcError:
    """The error with flags in place of keywords. flags: By keyword."""
    at = None if error.at is None else flags.get(error.at) or flags_for_keywords(error.at, flags)
    fix = None if error.fix is None else flags_for_keywords(error.fix, flags)
    flagged = LlmcError(flags_for_keywords(error.problem, flags), at=at, fix=fix)
    flagged.exit_code = error.exit_code
    return flagged


def flags_for_keywords(text: str, flags: Mapping[str, str]) -> str:
    """`name=value` becomes `--name value`; 'name' after "option", and names of several words, become `--name`."""
    if not flags:
        return text
    names = "|".join(sorted(map(re.escape, flags), key=len, reverse=True))
    text = re.sub(rf"(?<![\w./=-])(?P<name>{names})={_VALUE}", lambda match: _assigned(match, flags), text)
    text = re.sub(rf"(?<=option )'({names})'", lambda match: flags[match[1]], text)
    several = "|".join(sorted((re.escape(name) for name in flags if "_" in name), key=len, reverse=True))
    return re.sub(rf"(?<![\w./'=-])({several})(?![\w./'(=-])", lambda match: flags[match[1]], text) if several else text


def _assigned(match: re.Match[str], flags: Mapping[str, str]) -> str:
    value = next((text for text in match.group("only", "quoted", "bare") if text is not None), "")
    return flags[match["name"]] if value in ("True", "") else f"{flags[match['name']]} {value}"
