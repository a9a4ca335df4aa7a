"""Which weights the engine stores, and in which layout: one slot for each weight and layout that a launch reads."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from llmc.codegen.backend import Backend
from llmc.codegen.call import arguments_of
from llmc.codegen.expand_sparse import dense_recipe
from llmc.codegen.origin import unsupported
from llmc.codegen.views import View, Views
from llmc.formats.code_format import CODE_FORMATS, STEP_PARTS
from llmc.graph.dtype_names import DTYPE_NAMES
from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import is_product
from llmc.graph.weights import Derived, PerRank, Recipe, Stored
from llmc.program import Layout, WeightSlot, code_rows_layout, step_row_bytes


@dataclass(frozen=True)
class CodesRecipe:
    """The parts of code panels, or of codes or steps in rows, by the names of llmc::dequantize's arguments."""

    parts: Mapping[str, Recipe]
    format: str


# The recipe of a slot's tensor, before packing.
SlotRecipe = Recipe | CodesRecipe


class WeightSlots:
    """The requested slots, in the order in which the step first reads them.

    Placeholders with equal recipes (tied weights) share their slots.
    """

    def __init__(self, graph: ModelGraph, views: Views, backend: Backend) -> None:
        self._graph, self._backend = graph, backend
        self._slots: dict[tuple[Hashable, Layout, Hashable], tuple[WeightSlot, SlotRecipe]] = {}
        self._in_panels: set[tuple[Hashable, torch.dtype]] = set()
        for node in graph.graph.nodes:
            if backend.has_panels and is_product(node):
                x, weight = (arguments_of(node)[name] for name in ("x", "weight"))
                view = views[weight]
                if isinstance(view, View) and view.value.node.name in graph.weights:
                    self._in_panels.add((self._key(view.value.node), x.meta["val"].dtype))

    def slots(self) -> tuple[WeightSlot, ...]:
        """The weights' slots, in the order of the engine's weight pointers."""
        return tuple(slot for slot, _ in self._slots.values())

    def recipes(self) -> tuple[SlotRecipe, ...]:
        """The recipe of each slot's tensor, before packing."""
        return tuple(recipe for _, recipe in self._slots.values())

    def is_in_panels(self, weight: fx.Node, dtype: torch.dtype) -> bool:
        """Whether a matrix product of that dtype reads the weight."""
        return (self._key(weight), dtype) in self._in_panels

    def request(self, weight: fx.Node, layout: Layout, dtype: torch.dtype) -> WeightSlot:
        """The slot of a weight placeholder in a layout, made if there is none yet. VECTOR_F32 ignores `dtype`."""
        stored = torch.float32 if layout is Layout.VECTOR_F32 else dtype
        if stored not in self._backend.float_dtypes | {torch.int32}:
            raise unsupported(weight, f"a weight is {stored}", "build with dtype float32 or bfloat16")
        return self._slot(weight, layout, stored)

    def request_codes(self, parts: Mapping[str, fx.Node], format: str, layout: Layout) -> WeightSlot:
        """The slot of a quantized weight's placeholders in code panels."""
        key = (tuple((name, self._key(part)) for name, part in parts.items()), layout, format)
        if key not in self._slots:
            codes = parts["codes"]
            shape = tuple(int(s) for s in codes.meta["val"].shape)
            scales = parts["scales"].meta["val"]
            nbytes = self._backend.panels_nbytes(shape, scales, "zeros" in parts, format, layout)
            slot = WeightSlot(self._name(codes, layout), "U8", shape, layout, nbytes)
            recipes = {name: self._graph.weights[part.name] for name, part in parts.items()}
            self._slots[key] = slot, CodesRecipe(recipes, format)
        return self._slots[key][0]

    def request_sparse(
        self, parts: Mapping[str, fx.Node], columns: int, layout: Layout, dtype: torch.dtype
    ) -> WeightSlot:
        """The slot of a sparse weight in sparse panels. parts: the placeholders of values and masks, and of codes'
        scales, by name. dtype: the dtype of the elements in the panels."""
        key = (tuple(map(self._key, parts.values())), layout, dtype)
        if key not in self._slots:
            values, masks, scales = parts["values"], parts["masks"], parts.get("scales")
            shape = (int(masks.meta["val"].shape[0]), columns)
            recipe = dense_recipe(
                self._graph.weights[values.name], self._graph.weights[masks.name], columns, values.meta["val"].dtype
            )
            kept = None if scales is None else scales.meta["val"]
            nbytes = self._backend.sparse_nbytes(shape, layout, dtype, int(values.meta["val"].shape[0]), kept)
            name = self._name(values, layout)
            if scales is None:
                self._slots[key] = WeightSlot(name, DTYPE_NAMES[dtype], shape, layout, nbytes), recipe
            else:
                codes = CodesRecipe({"codes": recipe, "scales": self._graph.weights[scales.name]}, "int8")
                self._slots[key] = WeightSlot(name, "U8", shape, layout, nbytes), codes
        return self._slots[key][0]

    def request_sparse_rows(
        self, values: fx.Node, masks: fx.Node, dtype: torch.dtype
    ) -> tuple[WeightSlot, WeightSlot, WeightSlot]:
        """The slots of a sparse weight's placeholders, each by itself: elements in `dtype`, masks, and the number of
        each row's first element, which is computed from the masks."""
        return (
            self._slot(values, Layout.ROWS, dtype),
            self._slot(masks, Layout.MASK_ROWS, torch.uint8),
            self._slot(masks, Layout.MASK_STARTS, torch.int64),
        )

    def request_code_rows(self, parts: Mapping[str, fx.Node], format: str) -> dict[str, WeightSlot]:
        """The slots of a quantized weight's placeholders by themselves: codes in rows, steps in one slot if there are
        some, all others as given."""
        steps = {name: part for name, part in parts.items() if name in STEP_PARTS}
        slots: dict[str, WeightSlot] = {}
        for name, part in parts.items():
            if name == "codes":
                slots[name] = self._code_rows(part, format)
            elif name not in steps:
                slots[name] = self._slot(part, Layout.ROWS, part.meta["val"].dtype)
        if steps:
            shape = steps["scale_steps"].meta["val"].shape
            slots["steps"] = self._blocked_slot(steps, Layout.STEP_ROWS, format, shape)
        return slots

    def _code_rows(self, codes: fx.Node, format: str) -> WeightSlot:
        fake, layout = codes.meta["val"], code_rows_layout(format)
        if CODE_FORMATS[format].is_blocked:
            return self._blocked_slot({"codes": codes}, layout, format, fake.shape)
        return self._slot(codes, layout, fake.dtype if layout is Layout.CODE_ROWS else torch.uint8)

    def _blocked_slot(
        self, parts: Mapping[str, fx.Node], layout: Layout, format: str, shape: Sequence[int]
    ) -> WeightSlot:
        """The slot of some placeholders of a blocked format, whose record says what is stored for each number."""
        key = (tuple((name, self._key(part)) for name, part in parts.items()), layout, format)
        if key not in self._slots:
            name = self._name(next(iter(parts.values())), layout)
            stored = (shape[0], step_row_bytes(shape[1], format)) if layout is Layout.STEP_ROWS else tuple(shape)
            nbytes = self._backend.nbytes(stored, layout, torch.uint8)
            slot = WeightSlot(name, "U8", tuple(map(int, shape)), layout, nbytes)
            self._slots[key] = slot, CodesRecipe({n: self._graph.weights[p.name] for n, p in parts.items()}, format)
        return self._slots[key][0]

    def _slot(self, weight: fx.Node, layout: Layout, dtype: torch.dtype) -> WeightSlot:
        """The slot of that placeholder, layout and dtype."""
        key = (self._key(weight), layout, dtype)
        if key not in self._slots:
            shape = tuple(int(s) for s in weight.meta["val"].shape)
            nbytes = self._backend.nbytes(shape, layout, dtype)
            slot = WeightSlot(self._name(weight, layout), DTYPE_NAMES[dtype], shape, layout, nbytes)
            self._slots[key] = slot, self._graph.weights[weight.name]
        return self._slots[key][0]

    def _name(self, weight: fx.Node, layout: Layout) -> str:
        names = {slot.name for slot, _ in self._slots.values()}
        return weight.name if weight.name not in names else f"{weight.name}.{layout.value}"

    def _key(self, weight: fx.Node) -> Hashable:
        return recipe_key(self._graph.weights[weight.name])


def recipe_key(recipe: Any) -> Hashable:
    """A key of a recipe: equal for recipes that make the same tensor; a constant is equal to itself only."""
    if isinstance(recipe, Stored):
        return recipe
    if isinstance(recipe, Derived):
        return (recipe.target.name(), recipe_key(recipe.args), recipe_key(recipe.kwargs))
    if isinstance(recipe, PerRank):
        return ("ranks", recipe_key(recipe.recipes))
    if isinstance(recipe, tuple | list):
        return tuple(map(recipe_key, recipe))
    return recipe if isinstance(recipe, int | float | str | bool | torch.dtype | None) else id(recipe)
