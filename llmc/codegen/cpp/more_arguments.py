"""What kernels take beside what their ops do: of adapters, of the texts of a step as a whole, and of keys to choose."""

import torch

from llmc.codegen.call import Call
from llmc.codegen.cpp.kernel import Arguments
from llmc.program.adapter_pools import MOST_PARTS
from llmc.program.launch_arguments import Count


def adapted(call: Call) -> Arguments:
    """Pools and their sizes, where each part's columns end, and room for tokens in order and what A makes of them."""
    slots, parts, max_rank, _ = call.shape("lora_a")
    tokens, ends = call.count("x"), call.plain("ends")
    padded = [*ends, *[ends[-1]] * (MOST_PARTS - len(ends))]
    return {
        "slots": slots,
        "parts": parts,
        "max_rank": max_rank,
        "out": ends[-1],
        **{name: call.cache(name) for name in ("lora_a", "lora_b", "ranks")},
        "ends": None,
        **{f"end{index}": end for index, end in enumerate(padded)},
        "order": call.workspace("order", tokens, 2, torch.int32).pointer,
        "shrunk": call.workspace("shrunk", tokens, parts * max_rank, torch.float32),
    }


def of_requests(call: Call) -> Arguments:
    """How many texts there are."""
    return {"requests": Count.REQUESTS}


def pooled(call: Call) -> Arguments:
    """What pooling takes beside what its op does."""
    return {"requests": Count.REQUESTS, "is_mean": int(call.plain("pooling") == "mean"), "pooling": None}


def of_texts(call: Call) -> Arguments:
    """What attention to both sides takes: keys and values lie one position a block."""
    return {"requests": Count.REQUESTS, "block_size": 1}


def choosing(call: Call) -> Arguments:
    """What a choice of keys takes, with room for the scores of those that are best so far."""
    _, block_size, half = call.shape("k_cache")
    return {
        "requests": Count.REQUESTS,
        "max_blocks": Count.MAX_BLOCKS,
        "block_size": block_size,
        "half": half,
        **{name: call.cache(name) for name in ("k_cache", "v_cache")},
        "scores": call.workspace("scores", call.count("q"), call.plain("count"), torch.float32).pointer,
    }
