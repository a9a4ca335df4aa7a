"""Programmatic dependent launch: a kernel's blocks start while the launch before is still running, and wait for it.

Every kernel for sm_90 and later gets two instructions. `launch_dependents` comes first and lets the next launch start
as soon as all blocks of this one have started. `wait` holds a block until the launches before have ended and their
writes can be read. It comes second, or where the kernel says so (kernels/launch_edge.py), after loads of weights, which
no launch writes. Source: CUDA programming guide, "Programmatic dependent launch and synchronization".

The instructions are put into the PTX, because kernels are written once for all GPUs and older ones do not have them.
"""

import re

from llmc.codegen.triton.kernels.launch_edge import WAIT_HERE
from llmc.targets import GpuTarget

FIRST_ARCH = 90
_RELEASE, _WAIT = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
# Lines before a kernel's first instruction are declarations, positions in the source, labels or comments.
_BEFORE_INSTRUCTIONS = re.compile(r"\s*(\.|//|\$|$)")
# `wait` does not order copies by the asynchronous proxy after ordinary writes of the launch before. Prefetches are of
# weights, which no launch writes.
_BULK_COPY = re.compile(r"cp\.async\.bulk\.(?!prefetch\.)")


def releases_next_launch(target: GpuTarget) -> bool:
    """Whether kernels for the target get the two instructions."""
    return target.backend == "cuda" and int(target.arch) >= FIRST_ARCH


def with_dependent_launch(ptx: str) -> str:
    """A module of one kernel, with both instructions; one that has its own keeps them."""
    if _WAIT in ptx:
        return ptx
    lines = ptx.splitlines(keepends=True)
    body = next(i for i, line in enumerate(lines) if line.startswith("{"))
    first = next(i for i, line in enumerate(lines[body + 1 :], body + 1) if not _BEFORE_INSTRUCTIONS.match(line))
    places = [i for i, line in enumerate(lines) if WAIT_HERE in line]
    for place in places:
        lines[place] = f"\t{_WAIT};\n"
    lines[first:first] = [f"\t{_RELEASE};\n", *([] if places else [f"\t{_WAIT};\n"])]
    return "".join(lines)


def waits_for_launch_before(ptx: str) -> bool:
    """Whether a launch of the kernel may begin before the one ahead of it has ended."""
    return _WAIT in ptx and _BULK_COPY.search(ptx) is None
