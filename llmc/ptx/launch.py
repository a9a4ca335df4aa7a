"""One launch of a kernel: its grid, its arguments, its memory, and what the checks have found."""

from collections.abc import Sequence

import numpy as np

from llmc.ptx.errors import PtxError
from llmc.ptx.finding import Findings
from llmc.ptx.global_memory import Buffer, GlobalMemory
from llmc.ptx.kernel_plan import KernelPlan


class Launch:
    """Data shared by all teams of a launch.

    arguments: the bytes of each of the kernel's parameters, in order. waits: whether the launch may begin before
    earlier ones end, so that griddepcontrol.wait must precede dependent accesses.
    """

    def __init__(
        self,
        plan: KernelPlan,
        grid: tuple[int, int, int],
        arguments: Sequence[bytes],
        buffers: Sequence[Buffer],
        waits: bool,
    ) -> None:
        self.plan, self.grid, self.waits = plan, grid, waits
        self.memory = GlobalMemory([*buffers, *plan.variables])
        self.findings = Findings(plan.kernel.name, grid)
        parameters = plan.kernel.parameters
        if len(arguments) != len(parameters):
            raise PtxError(
                f"{plan.kernel.name} has {len(parameters)} parameters and is launched with {len(arguments)} arguments",
                at=plan.module,
                fix="pass what the kernel was compiled for",
            )
        # All of them, each where code finds it.
        end = max((p.offset + p.nbytes for p in parameters), default=0)
        self.parameters = np.zeros(end + 8, np.uint8)
        for parameter, argument in zip(parameters, arguments, strict=True):
            known = np.frombuffer(argument[: parameter.nbytes], np.uint8)
            self.parameters[parameter.offset : parameter.offset + len(known)] = known
