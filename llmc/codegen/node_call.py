"""How one node's arguments become those of a kernel call."""

import operator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from llmc.codegen.call import CODE_ROW_PARTS, arguments_of
from llmc.codegen.claims import Claims
from llmc.codegen.origin import unsupported
from llmc.codegen.placement import row_stride_only
from llmc.codegen.views import View, Views, view_of, views_of
from llmc.codegen.weight_slots import WeightSlots
from llmc.formats.code_format import CODE_PARTS
from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import is_of_experts, is_product, stored_rows
from llmc.program import Launch, Layout, Limits, RowCount
from llmc.program.launch_arguments import Count, Operand, Rows

_TOP_TOKENS = torch.ops.llmc.top_tokens.default
_FOLD = "compute it only from weights, independent of the tokens, so that it can be folded at build time"


class StepMemory(Protocol):
    """The interface of the step for calls that become its launches; implemented in launches.py."""

    graph: ModelGraph
    claims: Claims
    views: Views
    weights: WeightSlots
    limits: Limits

    def operand(self, view: View) -> tuple[Operand, int]:
        """The pointer to a computed view, and its row stride."""

    def contiguous(
        self, view: View, dtype: torch.dtype, node: fx.Node, copies: list[Launch], packed: bool = False
    ) -> View:
        """The view itself, or that of a copy whose rows are contiguous, made by a launch that goes to `copies`."""

    def workspace(self, node: fx.Node, name: str, rows: RowCount, columns: int, dtype: torch.dtype) -> Operand:
        """A buffer of its own for the launches of one node."""


class NodeCall:
    """Implements call.Call; repeated queries give the same answers.

    node: that is launched, or one that it claims; owner: which claims it. copies: launches that have to come before the
    node's own, since they copy requested rows or vectors that are not in the layout of kernels.
    """

    def __init__(
        self, builder: StepMemory, node: fx.Node, owner: fx.Node | None = None, copies: list[Launch] | None = None
    ) -> None:
        self._builder, self._node, self._owner = builder, node, owner or node
        self.copies: list[Launch] = [] if copies is None else copies
        self._arguments = arguments_of(node)
        self._given: dict[tuple[str, str], Operand] = {}
        self._within: dict[str, NodeCall] = {}

    @property
    def op(self) -> Any:
        return self._node.target

    def within(self, name: str) -> "NodeCall | None":
        node = self._arguments[name]
        if node not in self._builder.claims.before.get(self._owner, ()):
            return None
        return self._within.setdefault(name, NodeCall(self._builder, node, self._owner, self.copies))

    def names(self) -> tuple[str, ...]:
        return tuple(self._arguments)

    def producer(self, name: str, index: int) -> "NodeCall | None":
        item = self._arguments[name]
        if not isinstance(item, fx.Node) or item.target is not operator.getitem or item.args[1] != index:
            return None
        (node,) = item.all_input_nodes
        return NodeCall(self._builder, node, copies=self.copies)

    def readers(self, index: int) -> "tuple[NodeCall, ...]":
        items = (user for user in self._node.users if user.target is operator.getitem and user.args[1] == index)
        return tuple(NodeCall(self._builder, reader, copies=self.copies) for item in items for reader in item.users)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NodeCall) and other._node is self._node

    def __hash__(self) -> int:
        return hash(self._node)

    def shape(self, name: str) -> tuple[int, ...]:
        fake: Tensor = self._arguments[name].meta["val"]
        sizes = tuple(size for size in fake.shape if isinstance(size, int))
        return sizes[-1:] if self._flat_rows(fake) > 1 else sizes

    def count(self, name: str) -> Count | Rows | int:
        count, times = self._view(name).rows.count, self._flat_rows(self._arguments[name].meta["val"])
        return Rows(times, count) if times > 1 and isinstance(count, Count) else count

    def plain(self, name: str) -> Any:
        return self._arguments[name]

    def rows(self, name: str) -> Operand | None:
        if self._arguments[name] is None:
            return None
        if ("rows", name) not in self._given:
            times = self._flat_rows(self._arguments[name].meta["val"])
            view = self._view(name)
            view = self._builder.contiguous(view, view.value.dtype, self._owner, self.copies, packed=times > 1)
            operand, stride = self._builder.operand(view)
            row = next((s for d, s in zip(view.shape, view.strides, strict=True) if isinstance(d, RowCount)), 1)
            self._given["rows", name] = replace(operand, stride=stride // times if row else 0)
        return self._given["rows", name]

    def result(self, index: int = 0) -> Operand:
        view = views_of(self._node, self._builder.views)[index]
        operand, stride = self._builder.operand(view)
        value = self._node.meta["val"]
        times = self._flat_rows(value if isinstance(value, Tensor) else value[index])
        assert times == 1 or stride == view.value.columns, f"the rows of {self._node.name} lie apart"
        return replace(operand, stride=stride // times)

    def vector(self, name: str) -> Operand | None:
        if self._arguments[name] is None:
            return None
        if ("vector", name) not in self._given:
            self._given["vector", name] = self._vector(name)
        return self._given["vector", name]

    def _vector(self, name: str) -> Operand:
        view = self._view(name)
        if view.value.node.name in self._builder.graph.weights:
            if view.offset or not row_stride_only(view) or view.columns != view.value.columns:
                raise unsupported(self._node, f"{name} is a part of a weight", _FOLD)
            if view.value.dtype is torch.int32:
                slot = self._builder.weights.request(view.value.node, Layout.ROWS, torch.int32)
            else:
                slot = self._builder.weights.request(view.value.node, Layout.VECTOR_F32, torch.float32)
            return Operand("weight", slot.name)
        if view.value.node.op == "placeholder":
            return Operand("input", view.value.node.name, view.offset)
        dtype = torch.int32 if not view.value.dtype.is_floating_point else torch.float32
        whole = self._builder.contiguous(view, dtype, self._owner, self.copies, packed=True)
        return self._builder.operand(whole)[0]

    def weight(self, name: str, layout: Layout) -> Operand:
        node = self._weight_node(name)
        x = self._arguments.get("x")
        dtype = node.meta["val"].dtype
        if x is not None and dtype.is_floating_point:
            dtype = x.meta["val"].dtype
        if dtype is torch.int64:  # As computed integers, which are ids and indices, lie in memory.
            dtype = torch.int32
        return Operand("weight", self._builder.weights.request(node, layout, dtype).name)

    def code_panels(self, layout: Layout) -> Operand:
        slot = self._builder.weights.request_codes(self._code_parts(), self._arguments["format"], layout)
        return Operand("weight", slot.name)

    def sparse_panels(self, layout: Layout, dtype: torch.dtype) -> Operand:
        parts = {name: self._weight_node(name) for name in stored_rows(self._node)}
        slot = self._builder.weights.request_sparse(parts, self._arguments["columns"], layout, dtype)
        return Operand("weight", slot.name)

    def sparse_rows(self, dtype: torch.dtype) -> tuple[Operand, Operand, Operand]:
        values, masks = (self._weight_node(name) for name in ("values", "masks"))
        elements, places, starts = self._builder.weights.request_sparse_rows(values, masks, dtype)
        return Operand("weight", elements.name), Operand("weight", places.name), Operand("weight", starts.name)

    def code_rows(self) -> dict[str, Operand | None]:
        slots = self._builder.weights.request_code_rows(self._code_parts(), self._arguments["format"])
        operands = {name: Operand("weight", slot.name) for name, slot in slots.items()}
        return {name: operands.get(name) for name in CODE_ROW_PARTS}

    def _code_parts(self) -> dict[str, fx.Node]:
        return {name: self._weight_node(name) for name in CODE_PARTS if self._arguments[name] is not None}

    def table(self, name: str) -> Layout:
        weight = self._view(name).value.node
        in_panels = self._builder.weights.is_in_panels(weight, weight.meta["val"].dtype)
        return Layout.PANELS if in_panels else Layout.ROWS

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self._arguments[name].meta["val"].dtype
        return dtype

    def workspace(self, name: str, rows: Count | Rows | int, columns: int, dtype: torch.dtype) -> Operand:
        times, rows = (rows.times, rows.count) if isinstance(rows, Rows) else (1, rows)
        count = next(row_count for row_count in RowCount if row_count.count == rows)
        buffer = self._builder.workspace(self._owner, name, count, times * columns, dtype)
        return replace(buffer, stride=columns)

    def cache(self, name: str) -> Operand:
        layers = range(len(self._builder.graph.caches))
        names = {f"kv_cache_{layer}_{part}": f"{layer}.{part}" for layer in layers for part in "kv"}
        node = self._view(name).value.node.name
        return Operand("cache", names[node]) if node in names else Operand("adapter", node)

    def state(self, name: str) -> Operand:
        return Operand("state", self._view(name).value.node.name.removeprefix("state_"))

    def block_size(self) -> int:
        return self.shape("k_cache")[1]

    def limits(self) -> Limits:
        return self._builder.limits

    def _flat_rows(self, fake: Tensor) -> int:
        """Number of kernel rows per row of a tensor: for [rows, several, channels] it is `several`, if the kernel only
        supports rows. Kernels of experts support several rows per token."""
        knows_rows = is_product(self._owner) and not is_of_experts(self._owner)
        if fake.dim() != 3 or not (knows_rows or self._owner.target is _TOP_TOKENS):
            return 1
        return int(fake.shape[1])

    def _weight_node(self, name: str) -> fx.Node:
        view = self._view(name)
        if view.value.node.name not in self._builder.graph.weights or view != view.value.whole():
            raise unsupported(self._node, f"its {name} is computed in the step", _FOLD)
        return view.value.node

    def _view(self, name: str) -> View:
        return view_of(self._arguments[name], self._builder.views)
