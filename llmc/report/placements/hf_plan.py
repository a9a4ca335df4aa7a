"""Comparison of Hugging Face's tensor-parallel plan of an architecture with the plan derived from the graph."""

import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from llmc.report.placements.record import PlacedWeight

_GATHERS = "and gathers what comes out"
# The axis of a weight [out, in] that a style cuts, and what it does besides.
_STYLES: Mapping[str, tuple[int, str]] = {
    "colwise": (0, ""),
    "rowwise": (1, ""),
    "packed_colwise": (0, ""),
    "packed_rowwise": (1, ""),
    "colwise_rep": (0, _GATHERS),
    "colwise_gather_output": (0, _GATHERS),
    "rowwise_rep": (1, ""),
    "rowwise_split_input": (1, "of the parts it splits first"),
    "embedding_rowwise": (0, ""),
    "embedding_colwise": (1, ""),
}
_AXES = ("rows", "columns")
_THROUGH = ", evenly, through what has to stay together, such as a head"


def hf_plan(family: str) -> dict[str, str]:
    """Return the styles of Hugging Face's tensor-parallel plan by module name, with * for layers.

    The output projection that the causal model adds is included. The dict is empty if the family has no plan or
    transformers is not installed.
    """
    if find_spec("transformers") is None:
        return {}
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    layers = getattr(CONFIG_MAPPING[family], "base_model_tp_plan", None) if family in CONFIG_MAPPING else None
    if not isinstance(layers, dict):
        return {}
    output = getattr(getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family, ""), None), "_tp_plan", None)
    return {**layers, **(output if isinstance(output, dict) else {})}


def beside(weight: PlacedWeight, plan: Mapping[str, str]) -> str | None:
    """Compare a placement with Hugging Face's plan: "same", or the difference; None if the plan is empty."""
    if not plan:
        return None
    name = re.sub(r"[._]", "_", weight.name)
    style = next((style for module, style in plan.items() if _names(module, name)), None)
    if style is None:
        return "same" if weight.axis is None else "not in its plan: every rank has it whole"
    if style not in _STYLES:
        return f"its style {style!r}"
    axis, besides = _STYLES[style]
    if len(weight.shape) == 1:
        return "same"
    if "single head" in weight.why or (weight.axis == axis and not _is_even(weight)):
        return f"it cuts {_AXES[axis]}{_THROUGH}"
    gathers = besides == _GATHERS and "all_gather" in weight.why
    if weight.axis == axis and (gathers or not besides):
        return "same"
    return f"it cuts {_AXES[axis]} {besides}".rstrip()


def agreement(weights: Iterable[PlacedWeight], plan: Mapping[str, str]) -> tuple[int, int]:
    """Matrices, and those that both cut alike."""
    matrices = [weight for weight in weights if len(weight.shape) > 1]
    equal = [weight for weight in matrices if beside(weight, plan) == "same"]
    return sum(matrix.count for matrix in matrices), sum(agreeing.count for agreeing in equal)


def _is_even(weight: PlacedWeight) -> bool:
    """Whether the parts of the ranks are disjoint and equal in size to within one element, as in all styles."""
    piece = weight.shape[weight.axis or 0] // weight.runs
    largest = -(-piece // len(weight.parts))
    return sum(weight.parts) == weight.runs * piece and max(weight.parts) == weight.runs * largest


def _names(module: str, name: str) -> bool:
    parts = [r"\*" if part == "*" else re.escape(part) for part in re.split(r"[._]", module)]
    return re.search(rf"(^|_){'_'.join(parts)}_", name) is not None
