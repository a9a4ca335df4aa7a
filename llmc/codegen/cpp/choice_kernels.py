"""The kernel that chooses keys for an attention."""

import torch
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.cpp.kernel import DTYPES, Arguments, Kernel, named_arguments, refuse_dtypes
from llmc.codegen.cpp.kernel_library import function_name
from llmc.graph.refusal import Refusal
from llmc.program.launch_arguments import Count
from llmc.targets import CpuTarget

_FAMILY = "paged_choose_keys"


def choose_keys_kernel() -> Kernel:
    """llmc::paged_choose_keys, told apart by the elements of its queries and of the cache."""

    def element_types(call: Call) -> tuple[str, ...]:
        return DTYPES[call.dtype("q")], DTYPES[call.dtype("k_cache")]

    def arguments(call: Call) -> Arguments:
        _, block_size, half = call.shape("k_cache")
        scores = call.workspace("scores", call.count("q"), call.plain("count"), torch.float32)
        more: Arguments = {
            "requests": Count.REQUESTS,
            "max_blocks": Count.MAX_BLOCKS,
            "block_size": block_size,
            "half": half,
            "k_cache": call.cache("k_cache"),
            "v_cache": call.cache("v_cache"),
            "scores": scores.pointer,
        }
        function = function_name(_FAMILY, element_types(call))
        return named_arguments(call, function, {"q": "tokens: heads head_dim"}, ("y",), more)

    def refusal(node: fx.Node, target: CpuTarget) -> Refusal | None:
        return refuse_dtypes(node, ("q", "k_cache"))

    return Kernel(_FAMILY, element_types, arguments, refusal)
