"""Operands that a product's kernel computes itself: the stored form of the weight, and the preparation of x."""

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.op_record import Part, record_of


def part_of(node: object) -> Part | None:
    """The part of a product that a node computes, if any."""
    record = record_of(node) if isinstance(node, fx.Node) else None
    return None if record is None else record.part


def is_product(node: fx.Node) -> bool:
    """Whether a node multiplies x with a weight, in any stored form of either."""
    record = record_of(node)
    return record is not None and record.is_product


def is_of_experts(node: fx.Node) -> bool:
    """Whether a node multiplies each token only with the weights of the experts it is routed to."""
    record = record_of(node)
    return record is not None and record.is_of_experts


def is_lookup(node: fx.Node) -> bool:
    """Whether a node looks up rows of a weight, in any stored form."""
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
    """The parts that a kernel may compute itself: those in fp32, which it would not round before its fp32 sums."""
    return {name: part for name, part in parts_before(node).items() if part.meta["val"].dtype is torch.float32}


def stored_rows(storage: fx.Node) -> dict[str, fx.Node]:
    """The arguments of a storage that have a row for each row of the weight; absent ones left out."""
    record, arguments = record_of(storage), call_arguments(storage)
    names = () if record is None else record.rows
    return {name: arguments[name] for name in names if arguments[name] is not None}


def x_of(product: fx.Node) -> fx.Node:
    """The tensor that a product's kernel reads as x: the input of its arrival, if there is one."""
    source = unrounded_parts(product).get("x", product)
    x: fx.Node = call_arguments(source)["x"]
    return x
