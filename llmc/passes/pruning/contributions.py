"""How much each unit of an axis adds to the sums over it on calibration text, and what is lost without some of them.

A unit of channels c adds y_c = x_c·w_cᵀ to a product's output; it counts by the energy of that, Σ_tokens |y_c|², which
for one channel is (‖x_c‖·‖w_c‖)²: activation norm times weight norm.
Sources: Sun et al. 2023, "A simple and effective pruning approach for large language models", for the norms; An et al.
2024, "Fluctuation-based adaptive structured pruning for large language models", for whole channels and heads.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, fx

from llmc.graph.call_arguments import call_arguments
from llmc.passes.parallel.propagate_placements import Placements
from llmc.passes.pruning.inner_axes import InnerAxes
from llmc.passes.pruning.take_out import elements_of
from llmc.passes.quantization.stream import Stream

# Tokens that errors are measured on.
_MEASURED_ROWS = 256
# Which units of a class stay, given what each of them adds: [units].
Choose = Callable[[InnerAxes, Tensor], Tensor]


def choose_units(
    stream: Stream, placements: Placements, classes: Sequence[InnerAxes], choose: Choose
) -> list[tuple[Tensor, float]]:
    """The remaining units of each class, ascending, and the error without the others, from one run over the text."""
    products = {product: index for index, inner in enumerate(classes) for product in inner.products}
    energies = [torch.zeros(inner.count) for inner in classes]
    left = [len(inner.products) for inner in classes]
    chosen: dict[int, tuple[Tensor, float]] = {}
    for node in stream.stops(list(products)):
        index = products[node]
        inner, arguments = classes[index], call_arguments(node)
        x, weight = arguments["x"], stream.weight(arguments["weight"]).float()
        width = weight.shape[1] // inner.count
        energies[index] += _energies(stream.parts(x), weight, width)
        left[index] -= 1
        if left[index] == 0:
            kept = choose(inner, energies[index])
            scale = placements.scale(x, x.meta["val"].dim() - 1)
            chosen[index] = kept, _error(stream, x, weight, elements_of(kept, inner.unit, scale))
    return [chosen[index] for index in range(len(classes))]


def _energies(parts: Iterator[Tensor], weight: Tensor, width: int) -> Tensor:
    """[units], of `width` columns each."""
    grams = torch.zeros(weight.shape[1] // width, width, width)
    for part in parts:
        columns = part.reshape(-1, *grams.shape[:2]).float().transpose(0, 1)
        grams += columns.transpose(1, 2) @ columns
    own = weight.unflatten(1, grams.shape[:2]).transpose(0, 1)
    energies: Tensor = (grams * (own.transpose(1, 2) @ own)).sum((1, 2))
    return energies


def _error(stream: Stream, x: fx.Node, weight: Tensor, kept: Tensor) -> float:
    rows = stream.rows(x, _MEASURED_ROWS).float()
    expected = rows @ weight.t()
    lost = expected - rows[:, kept] @ weight[:, kept].t()
    return float(lost.norm() / expected.norm()) if bool(expected.any()) else 0.0
