"""What was taken out of one part of a model: for the report of a build, and for `llmc inspect`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrunedPart:
    """The channels of an MLP, the KV heads of an attention, or a layer as a whole.

    module: the product that sums over what is left, by its name in the checkpoint; of a layer, what its weights' names
    begin with. kind: "channels", "heads" or "layer". removed: which, of `of` that there were, in order. error: root
    mean square of what is missing from the sum on calibration text, over that of the sum; of a layer, of what it adds
    over that of what comes out of it. parameters: of the part's weights, and of what is left of them. modules: the
    weights that are gone.
    """

    module: str
    kind: str
    removed: tuple[int, ...]
    of: int
    error: float
    parameters: int
    parameters_left: int
    modules: tuple[str, ...] = ()
