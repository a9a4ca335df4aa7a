"""The line of the user's model that a node stands for."""

import re
from pathlib import PurePath

from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n?\s*(?P<code>[^\n]*)')


def source_line(node: fx.Node) -> str | None:
    """The innermost line of the model's source that made the node, as `llama/modeling_llama.py:62 in forward: code`.

    None for a node that no line made. Only the last two parts of the path are kept, so that engines and their reports
    do not differ by where a package is installed.
    """
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return None
    frame = frames[-1]
    where = "/".join(PurePath(frame["file"]).parts[-2:]).lstrip("/")
    code = f": {frame['code'].strip()}" if frame["code"].strip() else ""
    return f"{where}:{frame['line']} in {frame['function']}{code}"
