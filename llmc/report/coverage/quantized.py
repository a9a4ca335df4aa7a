"""Weights and products that should be quantized, according to the options or the checkpoint."""

from functools import partial

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import OpRecord
from llmc.graph.product_parts import part_of, parts_before
from llmc.options import BuildOptions
from llmc.passes.quantization.multiply_unrounded import is_multiplied
from llmc.report.coverage.rule import CoverageRule, calls, calls_of, calls_to, canonical, named, serving


def _is_product(record: OpRecord) -> bool:
    return record.is_product


def _is_part(record: OpRecord) -> bool:
    return record.part is not None


def _products(graph: ModelGraph, *, is_quantized: bool) -> list[fx.Node]:
    return [n for n in calls_of(graph, _is_product) if ("weight" in parts_before(n)) is is_quantized]


def _wants_codes(graph: ModelGraph, options: BuildOptions) -> bool:
    return bool(graph.quantized) or not options.quantization.is_none


def _readers_of_values(graph: ModelGraph) -> list[fx.Node]:
    """Readers of quantized weights or tokens that are not products of codes, in graph order."""
    return [
        n for n in calls(graph) if any(part_of(a) is not None and not is_multiplied(a, n) for a in n.all_input_nodes)
    ]


def _readers_of_codes(graph: ModelGraph) -> int:
    parts = ((n, parts_before(n).get("weight")) for n in calls(graph))
    return sum(weight is not None and is_multiplied(weight, n) for n, weight in parts)


def _plain_caches(graph: ModelGraph) -> list[fx.Node]:
    """The keys of caches without codes, except the newest rows of a layer that has codes."""
    names = {f"kv_cache_{spec.layer}_k" for spec in graph.caches if spec.format is None}
    recent = [call_arguments(node)["recent_k"] for node in calls_to(graph, torch.ops.llmc.paged_attention.default)]
    return [node for node in graph.inputs() if node.name in names and node not in recent]


QUANTIZED_RULES: tuple[CoverageRule, ...] = (
    canonical(
        "products",
        "quantized",
        ("read_codes", "quantize_weights"),
        _is_product,
        left_nodes=partial(_products, is_quantized=False),
        count=lambda graph: len(_products(graph, is_quantized=True)),
        reach=0,
        is_wanted=_wants_codes,
    ),
    serving(
        "readers of quantized weights",
        "computed on their codes",
        ("multiply_unrounded",),
        _is_part,
        left_nodes=_readers_of_values,
        count=_readers_of_codes,
        reach=0,
    ),
    serving(
        "KV caches",
        "quantized",
        ("quantize_kv_cache",),
        named(),
        left_nodes=_plain_caches,
        count=lambda graph: sum(spec.format is not None for spec in graph.caches),
        reach=0,
        is_wanted=lambda graph, options: options.kv_cache != "auto",
    ),
)
