"""Kernels that read the texts of a step as a whole."""

from llmc.codegen.call import Call
from llmc.codegen.cpp.kernel import Arguments
from llmc.program.launch_arguments import Count


def of_requests(call: Call) -> Arguments:
    """How many texts there are."""
    return {"requests": Count.REQUESTS}


def pooled(call: Call) -> Arguments:
    """What pooling takes beside what its op does."""
    return {"requests": Count.REQUESTS, "is_mean": int(call.plain("pooling") == "mean"), "pooling": None}


def of_texts(call: Call) -> Arguments:
    """What attention to both sides takes: keys and values lie one position a block."""
    return {"requests": Count.REQUESTS, "block_size": 1}
