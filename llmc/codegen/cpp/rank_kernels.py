"""Kernels in which ranks exchange data: their place among others, and the choice of tokens from distributed logits.

The gather of a step's logits has two alternative launches: all_gather if logits are read, and choose_across if tokens
are chosen without filters. A step that returns tokens therefore moves a few bytes per row instead of the vocabulary.
"""

from dataclasses import replace

from llmc.codegen.backend import KernelCall
from llmc.codegen.call import Call
from llmc.codegen.cpp.kernel import Arguments, Groups, Kernel, by_name
from llmc.program import StepOutput
from llmc.program.launch_arguments import Operand

CHOOSE_ACROSS = "choose_across"
_CHOSEN = (StepOutput.BEST, StepOutput.DRAWN)
_GATHERED = (StepOutput.LOGITS, StepOutput.FILTERED)
_CHOICES = Operand("input", "choices")


def among_ranks(call: Call) -> Arguments:
    """The place of this process among the ranks."""
    return {"ranks": Operand("engine", "ranks")}


def gathered() -> Kernel:
    """The kernel of llmc::all_gather."""
    kernel = by_name("all_gather", "x[tokens | groups? width]", more=among_ranks)
    return replace(kernel, groups=_or_chosen)


def _or_chosen(gather: KernelCall, call: Call) -> Groups:
    if call.result().space != "output" or gather.dtypes != ("F32",):
        return ((gather,),)
    (width,) = call.shape("x")
    kept = {name: gather.arguments[name] for name in ("tokens", "width", "ends", "x")}
    arguments = {**kept, "choices": _CHOICES, **among_ranks(call)}
    chosen = KernelCall(f"llmc_{CHOOSE_ACROSS}", CHOOSE_ACROSS, arguments, wanted=_CHOSEN, moved=f"{4 * width}*L")
    return (replace(gather, wanted=_GATHERED),), (chosen,)
