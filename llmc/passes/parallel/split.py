"""Where an axis is cut: which of its elements each rank has, and how many all of them have room for."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

from llmc.graph.product_parts import is_of_experts
from llmc.ops.expert_linear import PANEL_ROWS
from llmc.passes.parallel.propagate_placements import AxesClass, Scale


@dataclass(frozen=True)
class Split:
    """The division of an axis among ranks. spans: from where to where, by rank; a rank may share some with another, or
    have none. length: the length of the part on every rank, whose rest is padding: zeros in weights, which add nothing
    to a sum."""

    spans: tuple[tuple[int, int], ...]
    length: int

    def of(self, scale: Scale) -> "Split":
        """The division of another axis of the class, in that axis's elements."""
        spans = tuple(scale.own(*span) for span in self.spans)
        return Split(spans, -(-self.length // scale.per) * scale.unit)

    @property
    def idle(self) -> int:
        """Ranks that have none."""
        return sum(start == stop for start, stop in self.spans)

    @property
    def padding(self) -> int:
        """Elements of all ranks together that stand for none."""
        return sum(self.length - (stop - start) for start, stop in self.spans)


def split_class(axes: AxesClass, ranks: int) -> Split | None:
    """The split with the fewest elements per rank, and of those the one with the fewest empty ranks.

    None if every split leaves some rank all elements.

    An axis of `shared` units has one unit for all elements of a rank, or whole units only: so query heads stay with
    the KV head that they read, and codes with their scale.
    """
    splits = [
        split
        for unit in _units(axes)
        for split in (even_split(axes.size, ranks, unit), *_within(axes, unit, ranks))
        if split.length < axes.size and all(_keeps(split, per) for per in axes.shared)
    ]
    return min(splits, key=lambda split: (split.length, split.idle), default=None)


def in_panels(axes: AxesClass, split: Split) -> Split | None:
    """Pad a split so that each expert's rows begin at a panel. None if each rank would then have all rows."""
    multiple = 1
    for (node, _), scale in axes.members.items():
        if is_of_experts(node):
            multiple = math.lcm(multiple, scale.per * PANEL_ROWS // math.gcd(PANEL_ROWS, scale.unit * scale.runs))
    length = -(-split.length // multiple) * multiple
    return Split(split.spans, length) if length < axes.size else None


def most_ranks(classes: Collection[AxesClass], ranks: int) -> int:
    """The largest number of ranks, up to `ranks`, that each hold a part of every class."""
    return next((n for n in range(ranks, 1, -1) if all(_is_for_all(split_class(axes, n)) for axes in classes)), 1)


def even_split(size: int, ranks: int, unit: int = 1) -> Split:
    """Consecutive units of elements, equally many on each rank, or one less on the last ones."""
    spans = tuple((start * unit, stop * unit) for start, stop in _parts(size // unit, ranks))
    return Split(spans, max(stop - start for start, stop in spans))


def _is_for_all(split: Split | None) -> bool:
    return split is not None and not split.idle


def _units(axes: AxesClass) -> Iterator[int]:
    """The largest runs that may be kept together, and smaller ones."""
    granule, shared = axes.granule(), sorted(axes.shared)
    seen = {math.lcm(granule, *chosen) for count in range(len(shared) + 1) for chosen in combinations(shared, count)}
    yield from sorted((unit for unit in seen if axes.size % unit == 0), reverse=True)


def _within(axes: AxesClass, unit: int, ranks: int) -> Iterator[Split]:
    """The same split within each shared unit, if there are fewer units than ranks."""
    for per in axes.shared:
        count = axes.size // per
        if count < ranks and per % unit == 0:
            spans: list[tuple[int, int]] = []
            for index, (first, last) in enumerate(_parts(ranks, count)):
                for start, stop in _parts(per // unit, last - first):
                    spans.append((index * per + start * unit, index * per + stop * unit))
            yield Split(tuple(spans), max(stop - start for start, stop in spans))


def _parts(count: int, parts: int) -> list[tuple[int, int]]:
    base, more = divmod(count, parts)
    ends = [0]
    for part in range(parts):
        ends.append(ends[-1] + base + (part < more))
    return list(pairwise(ends))


def _keeps(split: Split, per: int) -> bool:
    if all(start % per == 0 and stop % per == 0 for start, stop in split.spans):
        return split.length % per == 0
    return all(start // per == max(start, stop - 1) // per for start, stop in split.spans)
