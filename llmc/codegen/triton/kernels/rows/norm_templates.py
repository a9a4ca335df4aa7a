"""Which launches compute a norm: a separate one, or those of the sum over ranks that it has claimed."""

from typing import Any

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate, rows
from llmc.codegen.triton.kernels.ranks.reduce_ways import NOTHING, Following, reduce_launches
from llmc.codegen.triton.kernels.ranks.row_shares import row_shares
from llmc.codegen.triton.kernels.refusals import takes
from llmc.codegen.triton.kernels.rows.norm_rows import norm_launch
from llmc.program.launch_arguments import Argument
from llmc.targets import GpuTarget

_supports = takes("x[tokens | groups? channels]", typed=("x", "residual"))


def norm(op: Any, *, centred: bool) -> KernelTemplate:
    """The kernel of a norm, or of one of a residual sum, which writes the sum too. Either summand may be a sum over
    ranks."""

    def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
        summands = [name for name in ("residual", "x") if name in call.names()]
        for name in summands:
            reduced = call.within(name)
            if reduced is not None:
                other = next((each for each in summands if each != name), None)
                following = _following(call, reduced, other, centred, target)
                return reduce_launches(reduced, call.result(), following, target)
        return (norm_launch(call, call.result(), centred=centred),)

    return KernelTemplate(op, _supports, candidates)


def _following(call: Call, reduced: Call, residual: str | None, centred: bool, target: GpuTarget) -> Following:
    """The part of a norm that follows a sum over ranks. residual: the argument that is added to the sum."""
    arguments: dict[str, Argument] = {
        "weight_ptr": call.vector("weight"),
        "bias_ptr": call.vector("bias") if centred else None,
    }
    if residual is not None:
        arguments |= {**rows("residual", call.rows(residual)), **rows("sum", call.result(1))}
    (channels,), ranks = reduced.shape("x"), reduced.plain("ranks")
    shares = row_shares(call, channels, ranks, target) if ranks > 2 else None
    return Following({**NOTHING, **arguments, "eps": call.plain("eps")}, True, centred, shares)
