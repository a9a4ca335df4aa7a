"""What quantization should reach, where the options or the checkpoint ask for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from llmc.debug.coverage_rules import CANONICAL_STAGES, SERVING_STAGES, CoverageRule, all_of, calls, count_of
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions

_DEQUANTIZE = torch.ops.llmc.dequantize.default
_DEQUANTIZE_TOKENS = torch.ops.llmc.dequantize_tokens.default


def _weight_of(node: fx.Node) -> fx.Node | None:
    """What a plain product reads as its weight."""
    is_plain = str(node.target) in ("llmc.linear.default", "llmc.lm_head.default")
    return call_arguments(node)["weight"] if is_plain else None


def _products_of(is_quantized: bool) -> Callable[[ModelGraph], list[fx.Node]]:
    def found(graph: ModelGraph) -> list[fx.Node]:
        weights = {node: _weight_of(node) for node in calls(graph)}
        return [n for n, w in weights.items() if w is not None and (w.target is _DEQUANTIZE) is is_quantized]

    return found


def _wants_codes(graph: ModelGraph, options: BuildOptions) -> bool:
    return bool(graph.quantized) or not options.quantization.is_none


def _readers_of_values(graph: ModelGraph) -> list[fx.Node]:
    """What reads dequantized weights or tokens, in graph order."""
    values = {*all_of(_DEQUANTIZE, _DEQUANTIZE_TOKENS)(graph)}
    return [n for n in calls(graph) if any(a in values for a in n.all_input_nodes)]


def _plain_caches(graph: ModelGraph) -> list[fx.Node]:
    names = {f"kv_cache_{spec.layer}_k" for spec in graph.caches if spec.format is None}
    return [node for node in graph.inputs() if node.name in names]


QUANTIZED_RULES: tuple[CoverageRule, ...] = (
    CoverageRule(
        "products",
        "quantized",
        ("read_codes", "quantize_weights"),
        CANONICAL_STAGES,
        lambda graph: len(_products_of(is_quantized=True)(graph)),
        _products_of(is_quantized=False),
        reach=0,
        is_wanted=_wants_codes,
    ),
    CoverageRule(
        "readers of quantized weights",
        "computed on their codes",
        ("fuse_quantized",),
        SERVING_STAGES,
        count_of("quantized_linear", "quantized_gated_linear", "quantized_lm_head", "quantized_embedding"),
        _readers_of_values,
        reach=0,
    ),
    CoverageRule(
        "KV caches",
        "quantized",
        ("quantize_kv_cache",),
        SERVING_STAGES,
        lambda graph: sum(spec.format is not None for spec in graph.caches),
        _plain_caches,
        reach=0,
        is_wanted=lambda graph, options: options.kv_cache != "auto",
    ),
)
