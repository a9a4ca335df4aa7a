"""Kernels that read and write what recurrent layers carry from token to token."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import fx

from llmc.codegen.call import Call, arguments_of
from llmc.codegen.cpp.kernel import Arguments, Kernel, by_name, no_more
from llmc.graph.refusal import Refusal
from llmc.program.launch_arguments import Count
from llmc.targets import CpuTarget

WIDEST_CONV = 32  # kWidest of kernels/causal_conv.cpp
WIDEST_KEY = 1024  # kWidestKey of kernels/linear_attention.cpp


def carrying(
    family: str,
    axes: str,
    *,
    typed: Sequence[str] | None = (),
    more: Callable[[Call], Arguments] = no_more,
    widest: tuple[str, int, int] | None = None,
) -> Kernel:
    """A kernel with the argument state, by name otherwise (kernel.by_name). widest: an argument, an axis of it and what
    that may be at most."""

    def of_states(call: Call) -> Arguments:
        return {"requests": Count.REQUESTS, "state": call.state("state"), **more(call)}

    def refusal(node: fx.Node, target: CpuTarget) -> Refusal | None:
        if widest is not None:
            name, axis, most = widest
            size = arguments_of(node)[name].meta["val"].shape[axis]
            if size > most:
                return Refusal(f"axis {axis} of {name} is {size}; the kernel takes {most} at most", node)
        return kernel.refusal(node, target)

    kernel = by_name(family, axes, typed=typed, more=of_states)
    return replace(kernel, refusal=refusal)


def semiring(call: Call) -> Arguments:
    """Whether sums are maxima."""
    return {"tropical": int(call.plain("tropical"))}


def decays(call: Call) -> Arguments:
    """Number of decays per head and token."""
    shape = call.shape("decay")
    return {"decays": shape[1] if len(shape) == 2 else 1}
