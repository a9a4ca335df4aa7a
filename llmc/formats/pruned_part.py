"""The record of a pruned part of a model, for the report of a build and `llmc inspect`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrunedPart:
    """The channels of an MLP, the KV heads or the value channels of an attention, or a layer as a whole.

    module: the product that sums over the remaining units, by its name in the checkpoint; for a layer, the prefix of
    its weights' names. kind: "channels", "heads", "values" or "layer". removed: the removed units among `of`, in order;
    of values, in the order of their energy, each KV head's. error: root mean square of the missing part of the sum on
    calibration text, over that of the sum; for a layer, of its contribution over that of its output; for values, of
    their own missing part. parameters: number in the part's weights, before and after. modules: the
    removed weights.
    """

    module: str
    kind: str
    removed: tuple[int, ...]
    of: int
    error: float
    parameters: int
    parameters_left: int
    modules: tuple[str, ...] = ()
