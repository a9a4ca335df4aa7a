"""The line of the user's model that a node stands for."""

from __future__ import annotations


def source_line(stack_trace: str | None) -> str | None:
    """The innermost frame of a stack trace as `file.py:12: code`; None without one."""
    if not stack_trace:
        return None
    lines = [line.strip() for line in stack_trace.strip().splitlines()]
    at = next((i for i in range(len(lines) - 1, -1, -1) if lines[i].startswith("File ")), None)
    if at is None:
        return None
    path, _, rest = lines[at].removeprefix("File ").partition(", line ")
    code = lines[at + 1] if at + 1 < len(lines) else ""
    return f"{path.strip(chr(34))}:{rest.split(',')[0]}: {code}".removesuffix(": ")
