"""Storage of adapters next to an engine's weights: a pool per adapted product, with one slot per concurrent adapter."""

import math
from dataclasses import dataclass

# Maximum modules of one product, such as q, k and v, and one more.
MOST_PARTS = 4
_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4}


@dataclass(frozen=True)
class RowRun:
    """`count` rows of a module's weight from row `first` on."""

    first: int
    count: int


@dataclass(frozen=True)
class AdaptedModule:
    """A module whose weight is part of a product's weight, such as q_proj in a merged QKV product.

    Attributes:
        name: The end of the module's name, by which adapters refer to it.
        inputs: Its input channels.
        outputs: Its output channels.
        end: The column after its last one in the product's sums. Its first is the previous module's `end`, or 0.
        rows: The runs of its rows, in the order of these columns.
    """

    name: str
    inputs: int
    outputs: int
    end: int
    rows: tuple[RowRun, ...]


@dataclass(frozen=True)
class AdaptedProduct:
    """A product of x with `inputs` channels that computes `columns` sums. dtype: the pools' dtype in safetensors."""

    name: str
    inputs: int
    columns: int
    dtype: str
    modules: tuple[AdaptedModule, ...]


@dataclass(frozen=True)
class AdapterPools:
    """The pools of each product: A [slots, modules, max_rank, inputs], B [slots, max_rank, columns] including the
    scale, and ranks [slots, modules] in int32."""

    slots: int
    max_rank: int
    products: tuple[AdaptedProduct, ...]

    def shapes(self, product: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a product's three pools, by their names in graphs and launches, in the order of engines."""
        of = self.products[product]
        count = len(of.modules)
        return {
            f"lora_{product}_a": (self.slots, count, self.max_rank, of.inputs),
            f"lora_{product}_b": (self.slots, self.max_rank, of.columns),
            f"lora_{product}_ranks": (self.slots, count),
        }

    def dtypes(self) -> dict[str, str]:
        """The dtypes of all pools by name, as safetensors names them."""
        return {
            name: "I32" if name.endswith("_ranks") else product.dtype
            for index, product in enumerate(self.products)
            for name in self.shapes(index)
        }

    def nbytes(self) -> dict[str, int]:
        """The size of each pool in bytes, by name."""
        shapes = {name: shape for index in range(len(self.products)) for name, shape in self.shapes(index).items()}
        return {name: math.prod(shapes[name]) * _BYTES[dtype] for name, dtype in self.dtypes().items()}

    def names(self) -> tuple[str, ...]:
        """The names of all pools, in order."""
        return tuple(name for product in range(len(self.products)) for name in self.shapes(product))
