"""Order what one lane writes of a tensor map before its warp copies the map from shared memory.

Triton up to 3.7 leaves out the barrier of the warp between them, which 3.9 has. Source: PTX manual,
"tensormap.cp_fenceproxy": the whole warp copies, and a barrier makes visible what other lanes have written.
"""

import re

_WRITE, _BARRIER = "tensormap.replace.", "bar.warp.sync"
_COPY = re.compile(r"([ \t]*(?:@!?%\w+ )?)tensormap\.cp_fenceproxy\.")


def with_ordered_descriptors(ptx: str) -> str:
    """A module in which a barrier of the warp lies between the writes of each tensor map and its copy."""
    lines: list[str] = []
    is_ordered = True
    for line in ptx.splitlines(keepends=True):
        copy = _COPY.match(line)
        if copy is not None and not is_ordered:
            lines.append(f"{copy[1]}{_BARRIER} 0xffffffff;\n")
        if _WRITE in line:
            is_ordered = False
        elif _BARRIER in line or copy is not None:
            is_ordered = True
        lines.append(line)
    return "".join(lines)
