"""What quantization should reach, where the options or the checkpoint ask for it."""

from collections.abc import Callable

from torch import fx

from llmc.debug.coverage_rule import CANONICAL_STAGES, SERVING_STAGES, CoverageRule, calls, calls_of, named
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import OpRecord
from llmc.graph.product_parts import part_of, parts_before
from llmc.options import BuildOptions
from llmc.passes.quantization.multiply_unrounded import is_multiplied


def _is_product(record: OpRecord) -> bool:
    return record.is_product


def _is_part(record: OpRecord) -> bool:
    return record.part is not None


def _products_of(is_quantized: bool) -> Callable[[ModelGraph], list[fx.Node]]:
    def found(graph: ModelGraph) -> list[fx.Node]:
        return [n for n in calls_of(graph, _is_product) if ("weight" in parts_before(n)) is is_quantized]

    return found


def _wants_codes(graph: ModelGraph, options: BuildOptions) -> bool:
    return bool(graph.quantized) or not options.quantization.is_none


def _readers_of_values(graph: ModelGraph) -> list[fx.Node]:
    """What reads the values of quantized weights or tokens without being a product of codes, in graph order."""
    return [
        n for n in calls(graph) if any(part_of(a) is not None and not is_multiplied(a, n) for a in n.all_input_nodes)
    ]


def _readers_of_codes(graph: ModelGraph) -> int:
    parts = ((n, parts_before(n).get("weight")) for n in calls(graph))
    return sum(weight is not None and is_multiplied(weight, n) for n, weight in parts)


def _plain_caches(graph: ModelGraph) -> list[fx.Node]:
    names = {f"kv_cache_{spec.layer}_k" for spec in graph.caches if spec.format is None}
    return [node for node in graph.inputs() if node.name in names]


QUANTIZED_RULES: tuple[CoverageRule, ...] = (
    CoverageRule(
        "products",
        "quantized",
        ("read_codes", "quantize_weights"),
        CANONICAL_STAGES,
        _is_product,
        left_nodes=_products_of(is_quantized=False),
        count=lambda graph: len(_products_of(is_quantized=True)(graph)),
        reach=0,
        is_wanted=_wants_codes,
    ),
    CoverageRule(
        "readers of quantized weights",
        "computed on their codes",
        ("multiply_unrounded",),
        SERVING_STAGES,
        _is_part,
        left_nodes=_readers_of_values,
        count=_readers_of_codes,
        reach=0,
    ),
    CoverageRule(
        "KV caches",
        "quantized",
        ("quantize_kv_cache",),
        SERVING_STAGES,
        named(),
        left_nodes=_plain_caches,
        count=lambda graph: sum(spec.format is not None for spec in graph.caches),
        reach=0,
        is_wanted=lambda graph, options: options.kv_cache != "auto",
    ),
)
