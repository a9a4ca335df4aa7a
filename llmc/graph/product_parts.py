"""What stands right before a product and is its kernel's to compute: how the weight is stored, how x arrives."""

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.op_record import Part, record_of


def part_of(node: object) -> Part | None:
    """What part of a product a node is, if any."""
    record = record_of(node) if isinstance(node, fx.Node) else None
    return None if record is None else record.part


def is_product(node: fx.Node) -> bool:
    """Whether a node multiplies x with a weight, however both come to it."""
    record = record_of(node)
    return record is not None and record.is_product


def is_of_experts(node: fx.Node) -> bool:
    """Whether it multiplies each token with the weights of those experts alone that it was sent to."""
    record = record_of(node)
    return record is not None and record.is_of_experts


def is_lookup(node: fx.Node) -> bool:
    """Whether a node looks up rows of a weight, however that is stored."""
    record = record_of(node)
    return record is not None and record.is_lookup


def takes_adapters(node: fx.Node) -> bool:
    """Whether a product adds to its sums what adapters say."""
    record = record_of(node)
    return record is not None and record.is_product and "delta" in record.arguments


def parts_before(node: fx.Node) -> dict[str, fx.Node]:
    """The parts before a product or lookup, by its argument; none before any other node."""
    record = record_of(node)
    if record is None or not record.takes:
        return {}
    arguments = call_arguments(node)
    return {name: arguments[name] for name, part in record.takes.items() if part_of(arguments[name]) is part}


def unrounded_parts(node: fx.Node) -> dict[str, fx.Node]:
    """Those that a kernel may compute: it rounds nothing between what a part stands for and the sums in fp32."""
    return {name: part for name, part in parts_before(node).items() if part.meta["val"].dtype is torch.float32}


def stored_rows(storage: fx.Node) -> dict[str, fx.Node]:
    """The arguments of a storage that have a row for each row of the weight; absent ones left out."""
    record, arguments = record_of(storage), call_arguments(storage)
    names = () if record is None else record.rows
    return {name: arguments[name] for name in names if arguments[name] is not None}


def x_of(product: fx.Node) -> fx.Node:
    """What a product's kernel reads as x: what its arrival reads, if it has one."""
    source = unrounded_parts(product).get("x", product)
    x: fx.Node = call_arguments(source)["x"]
    return x
