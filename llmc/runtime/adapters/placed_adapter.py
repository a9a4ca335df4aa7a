"""An adapter's matrices as an engine's pools have them, checked against the model that the engine was built from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.adapters.adapter import Adapter, LoraModule
from llmc.errors import AdapterError
from llmc.program import AdapterPools
from llmc.program.adapter_pools import AdaptedModule, AdaptedProduct

# Elements of a pool: float32, float16, or the upper half of a float32's bits for bfloat16.
Elements = npt.NDArray[np.float32 | np.float16 | np.uint16]


@dataclass(frozen=True)
class PlacedPart:
    """The matrices of one module of a product: a [rank, inputs], b [rank, columns of the module]. begin: its first
    column."""

    product: int
    part: int
    begin: int
    a: Elements
    b: Elements


@dataclass(frozen=True, eq=False)
class PlacedAdapter:
    """An adapter in the form of the engine's pools. name: as requests call it. digest: the digest of its content,
    whatever it is called. parts: the parts of the modules that it changes; all others have rank 0. source: the
    directory that it was read from."""

    name: str
    digest: str
    source: str
    parts: tuple[PlacedPart, ...]

    def put(self, pools: Sequence[tuple[Any, ...]], slot: int, stored: Callable[[Elements], Any]) -> None:
        """Write the adapter into a slot, replacing its contents. pools: A, B and ranks of each product. stored:
        converts elements to the form of the pools."""
        for *_, ranks in pools:
            ranks[slot] = 0
        for part in self.parts:
            a, b, ranks = pools[part.product]
            rank, columns = part.b.shape
            a[slot, part.part, :rank] = stored(part.a)
            b[slot, :rank, part.begin : part.begin + columns] = stored(part.b)
            ranks[slot, part.part] = rank


def place_adapter(name: str, adapter: Adapter, pools: AdapterPools) -> PlacedAdapter:
    """Read the matrices. Raises AdapterError for an adapter of another model, one that must be merged, or a rank above
    the engine's."""
    at = adapter.file.path
    if adapter.whole:
        tensor = next(iter(adapter.whole.values()))
        shape = list(adapter.file.shapes()[tensor])
        raise AdapterError(f"the adapter replaces a whole weight: {tensor} {shape}", at=at, fix=_MERGE_IT)
    # A module has several where one product of it is for all tokens, and one for the wanted rows.
    homes: dict[str, list[tuple[int, int]]] = {}
    for index, product in enumerate(pools.products):
        for part, of in enumerate(product.modules):
            homes.setdefault(of.name, []).append((index, part))
    parts: list[PlacedPart] = []
    for key, module in adapter.modules.items():
        if key not in homes or module.is_table:
            near = get_close_matches(key, homes, n=1)
            raise AdapterError(
                f"the engine has no linear layer {module.name!r} that adapters can change",
                at=at,
                fix=(f"did you mean {near[0]}? " if near else "") + _MERGE_IT,
            )
        if module.rank > pools.max_rank:
            raise AdapterError(
                f"{module.name} has rank {module.rank}, the engine was built for {pools.max_rank}",
                at=at,
                fix=f"build the engine with max_lora_rank={module.rank}",
            )
        parts += [_placed(adapter, module, pools.products[home[0]], *home) for home in homes[key]]
    return PlacedAdapter(name, adapter.digest, str(adapter.directory), tuple(parts))


_MERGE_IT = "merge it into the weights: llmc build MODEL --lora NAME=DIRECTORY"


def _placed(adapter: Adapter, module: LoraModule, of: AdaptedProduct, product: int, part: int) -> PlacedPart:
    home: AdaptedModule = of.modules[part]
    if (module.inputs, module.outputs) != (home.inputs, home.outputs):
        raise AdapterError(
            f"{module.name} has {module.inputs} inputs and {module.outputs} outputs, the model's {home.inputs} and "
            f"{home.outputs}",
            at=adapter.file.path,
            fix="name an adapter that was trained on this model",
        )
    a, b = adapter.matrices(module)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise AdapterError(f"{module.name} has numbers that are not finite", at=adapter.file.path, fix="train it again")
    columns = np.concatenate([b[run.first : run.first + run.count] for run in home.rows]).T
    begin = of.modules[part - 1].end if part else 0
    return PlacedPart(product, part, begin, _stored(a, of.dtype), _stored(columns, of.dtype))


def _stored(values: npt.NDArray[np.float32], dtype: str) -> Elements:
    if dtype == "F32":
        return np.ascontiguousarray(values)
    if dtype == "F16":
        return values.astype(np.float16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to nearest even
