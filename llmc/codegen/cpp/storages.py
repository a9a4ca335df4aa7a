"""How C++ kernels read weights, by the op that yields them: the table to which a new storage adds a row.

Each row's functions are instantiated in C++ for every product and for lookups.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from llmc.codegen.call import Call, arguments_of, stored_weight
from llmc.codegen.cpp.kernel import SCALES
from llmc.codegen.cpp.panel import PANEL
from llmc.formats.code_format import CODE_FORMATS, TOKEN_GROUP
from llmc.graph.refusal import Refusal
from llmc.program import Layout
from llmc.program.launch_arguments import Argument

_llmc = torch.ops.llmc


@dataclass(frozen=True)
class Storage:
    """How kernels read a weight.

    family: the beginning of the names of the functions of its products, before the product's name. product: the
    arguments that say where the weight lies, and how x arrives, from a call of a product and whether its rows are gates
    and what they gate. lookup: the function of an embedding and those arguments. refusal: the reason why no kernel
    reads the weight, given a product or lookup and its parts by argument. arrivals: the ops that may yield x.
    of_experts: whether rows of one expert among many can be found.
    """

    family: str
    product: Callable[[Call, bool], dict[str, Argument]]
    lookup: Callable[[Call], tuple[str, dict[str, Argument]]]
    refusal: Callable[[fx.Node, Mapping[str, fx.Node]], Refusal | None]
    arrivals: frozenset[Any] = frozenset()
    of_experts: bool = True


# ---- dense weights ---------------------------------------------------------------------------------------------------


def _panels(call: Call, gated: bool) -> dict[str, Argument]:
    return {"weight": call.weight("weight", Layout.GATED_PANELS if gated else Layout.PANELS)}


def _table(call: Call) -> tuple[str, dict[str, Argument]]:
    layout = call.table("weight")
    name = "embedding_panels" if layout is Layout.PANELS else "embedding"
    return name, {"weight": call.weight("weight", layout)}


def dense_refusal(node: fx.Node, parts: Mapping[str, fx.Node]) -> Refusal | None:
    """The refusal for inputs that no kernel of a product or lookup of a dense weight reads."""
    arguments = arguments_of(node)
    weight, result = arguments["weight"].meta["val"].dtype, node.meta["val"].dtype
    if "x" not in arguments:
        return None if weight is result else Refusal(f"the table is {weight} but the result {result}", node)
    x = arguments["x"].meta["val"].dtype
    if weight.itemsize > x.itemsize:
        return Refusal(f"the weight is {weight} but x is {x}: packing it would lose digits", node)
    return None


# ---- codes -----------------------------------------------------------------------------------------------------------


def _code_panels(call: Call, gated: bool) -> dict[str, Argument]:
    return _codes(call, Layout.GATED_CODE_PANELS if gated else Layout.CODE_PANELS) | _rounding(call)


def _code_table(call: Call) -> tuple[str, dict[str, Argument]]:
    return "quantized_embedding", _codes(call, Layout.CODE_PANELS)


def _rounding(call: Call) -> dict[str, Argument]:
    """The arguments that describe how x is rounded."""
    arrived = call.within("x")
    if arrived is None:
        return {"x_format": "none"}
    return {
        "x_scale": arrived.vector("scale"),
        "x_format": arrived.plain("format"),
        "x_group": arrived.plain("group") or 0,
    }


def _codes(call: Call, layout: Layout) -> dict[str, Argument]:
    stored = stored_weight(call)
    return {
        "group": stored.shape("codes")[1] // stored.shape("scales")[1],
        "weight": stored.code_panels(layout),
        "format": stored.plain("format"),
        "scale_type": SCALES[stored.dtype("scales")],
        "has_zeros": stored.plain("zeros") is not None,
    }


def _codes_refusal(node: fx.Node, parts: Mapping[str, fx.Node]) -> Refusal | None:
    stored, arrived = arguments_of(parts["weight"]), arguments_of(parts["x"]) if "x" in parts else {}
    format, x_format = stored["format"], arrived.get("format", "none")
    scales = stored["scales"].meta["val"]
    if x_format not in CODE_FORMATS[format].activations:
        return Refusal(f"kernels do not multiply {x_format} activations and {format} weights", node)
    if scales.dtype not in SCALES:
        return Refusal(f"scales are {scales.dtype}; kernels know {', '.join(map(str, SCALES))}", node)
    columns, groups = parts["weight"].meta["val"].shape[1], scales.shape[1]
    if groups > 1 and columns // groups % 16:
        return Refusal(
            f"groups are of {columns // groups} columns; kernels support multiples of 16, or one per row", node
        )
    if arrived.get("group") is not None:
        return _token_groups_refusal(node, arrived["group"], columns // groups if groups > 1 else None)
    return None


def _token_groups_refusal(node: fx.Node, tokens: int, weights: int | None) -> Refusal | None:
    """The refusal for groups of a token's channels, given those of the weight's columns; None stands for one per
    row."""
    if tokens != TOKEN_GROUP:
        return Refusal(f"tokens are rounded by groups of {tokens} channels; kernels know {TOKEN_GROUP}", node)
    if weights is not None and weights % tokens and weights != 16:
        return Refusal(
            f"tokens are rounded by groups of {tokens} channels, which cut groups of {weights} columns", node
        )
    return None


# ---- weights without their zeros -------------------------------------------------------------------------------------


def _sparse_panels(call: Call, gated: bool) -> dict[str, Argument]:
    layout = Layout.GATED_SPARSE_PANELS if gated else Layout.SPARSE_PANELS
    return {"weight": stored_weight(call).sparse_panels(layout, (call.within("x") or call).dtype("x"))}


def _sparse_table(call: Call) -> tuple[str, dict[str, Argument]]:
    dtype = call.plain("dtype") or call.dtype("weight")
    weight = stored_weight(call).sparse_panels(Layout.SPARSE_PANELS, dtype)
    return "sparse_embedding", {"weight": weight, "panels": _panel_count(call)}


def _sparse_refusal(node: fx.Node, parts: Mapping[str, fx.Node]) -> Refusal | None:
    arguments, stored = arguments_of(node), arguments_of(parts["weight"])
    values, result = stored["values"].meta["val"].dtype, node.meta["val"].dtype
    read = result if "x" not in arguments else arguments["x"].meta["val"].dtype
    if values.itemsize > read.itemsize:
        return Refusal(f"the weight is {values} but read as {read}: packing it would lose digits", node)
    return None


def _sparse_code_panels(call: Call, gated: bool) -> dict[str, Argument]:
    layout = Layout.GATED_SPARSE_CODE_PANELS if gated else Layout.SPARSE_CODE_PANELS
    return _sparse_codes(call, layout) | _rounding(call)


def _sparse_code_table(call: Call) -> tuple[str, dict[str, Argument]]:
    where = _sparse_codes(call, Layout.SPARSE_CODE_PANELS)
    return "sparse_code_embedding", where | {"panels": _panel_count(call)}


def _sparse_codes(call: Call, layout: Layout) -> dict[str, Argument]:
    stored = stored_weight(call)
    return {
        "group": stored.plain("columns") // stored.shape("scales")[1],
        "weight": stored.sparse_panels(layout, torch.int8),
        "format": stored.plain("format"),
        "scale_type": SCALES[stored.dtype("scales")],
        "has_zeros": False,
        "is_sparse": True,
    }


def _panel_count(call: Call) -> int:
    return -(-call.shape("weight")[0] // PANEL)


# ---- rows ------------------------------------------------------------------------------------------------------------


def rows(reader: str, *parts: str) -> Storage:
    """A storage without its own products: llmc_rows_`reader` yields its rows from these arguments of its
    op, each stored in rows as it is."""

    def where(call: Call) -> dict[str, Argument]:
        stored = stored_weight(call)
        arguments: dict[str, Argument] = {"read": reader}
        for index, name in enumerate(parts):
            operand = stored.weight(name, Layout.ROWS)
            arguments[f"part{index}"] = replace(operand, stride=stored.shape(name)[1])
        return arguments

    return Storage(
        "row_", lambda call, gated: where(call), lambda call: ("row_embedding", where(call)), lambda node, parts: None
    )


# By the op that yields the weight; None for a dense weight, which no op yields.
STORAGES: Mapping[Any, Storage] = MappingProxyType(
    {
        None: Storage("", _panels, _table, dense_refusal),
        _llmc.sparse_bitmask.default: Storage(
            "sparse_", _sparse_panels, _sparse_table, _sparse_refusal, of_experts=False
        ),
        _llmc.sparse_codes.default: Storage(
            "quantized_",
            _sparse_code_panels,
            _sparse_code_table,
            _codes_refusal,
            frozenset({_llmc.round_tokens.default}),
            of_experts=False,
        ),
        _llmc.dequantize.default: Storage(
            "quantized_", _code_panels, _code_table, _codes_refusal, frozenset({_llmc.round_tokens.default})
        ),
    }
)
