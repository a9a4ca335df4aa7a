"""Further arguments of kernels, in addition to their ops': for adapters, for whole texts in a step, and for chosen
keys."""

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
    """The argument with the number of texts."""
    return {"requests": Count.REQUESTS}


def pooled(call: Call) -> Arguments:
    """Further arguments of pooling, in addition to its op's."""
    return {"requests": Count.REQUESTS, "is_mean": int(call.plain("pooling") == "mean"), "pooling": None}


def of_texts(call: Call) -> Arguments:
    """Arguments of bidirectional attention: keys and values with one position per block."""
    return {"requests": Count.REQUESTS, "block_size": 1}


def choosing(call: Call) -> Arguments:
    """Arguments of a choice of keys, including memory for the scores of the current best keys."""
    _, block_size, half = call.shape("k_cache")
    return {
        "requests": Count.REQUESTS,
        "max_blocks": Count.MAX_BLOCKS,
        "block_size": block_size,
        "half": half,
        **{name: call.cache(name) for name in ("k_cache", "v_cache")},
        "scores": call.workspace("scores", call.count("q"), call.plain("count"), torch.float32).pointer,
    }
