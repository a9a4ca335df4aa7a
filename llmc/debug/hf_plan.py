"""Hugging Face's own tensor-parallel plan of an architecture, beside what was derived from the graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from llmc.debug.placement_record import PlacedWeight

# The axis of a weight [out, in] that a style cuts, and what it does besides.
_STYLES: Mapping[str, tuple[int, str]] = {
    "colwise": (0, ""),
    "rowwise": (1, ""),
    "packed_colwise": (0, ""),
    "packed_rowwise": (1, ""),
    "colwise_rep": (0, "and gathers what comes out"),
    "colwise_gather_output": (0, "and gathers what comes out"),
    "rowwise_rep": (1, ""),
    "rowwise_split_input": (1, "of what it parts first"),
}
_AXES = ("rows", "columns")


def hf_plan(family: str) -> dict[str, str]:
    """Styles by module name, with * for layers; empty where there is no plan, or no transformers."""
    if find_spec("transformers") is None:
        return {}
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    plan = getattr(CONFIG_MAPPING[family], "base_model_tp_plan", None) if family in CONFIG_MAPPING else None
    return dict(plan) if isinstance(plan, dict) else {}


def beside(weight: PlacedWeight, plan: Mapping[str, str]) -> str | None:
    """ "same", or how Hugging Face's plan differs; None where there is no plan at all."""
    if not plan:
        return None
    name = re.sub(r"[._]", "_", weight.name)
    style = next((style for module, style in plan.items() if _names(module, name)), None)
    if style is None:
        return "same" if weight.axis is None else "not in its plan: every rank has it whole"
    if style not in _STYLES:
        return f"its style {style!r}"
    axis, besides = _STYLES[style]
    if len(weight.shape) == 1 or (weight.axis == axis and not besides):
        return "same"
    return f"it cuts {_AXES[axis]} {besides}".rstrip()


def agreement(weights: Iterable[PlacedWeight], plan: Mapping[str, str]) -> tuple[int, int]:
    """Matrices, and those that both cut alike."""
    matrices = [weight for weight in weights if len(weight.shape) > 1]
    same = [weight for weight in matrices if beside(weight, plan) == "same"]
    return sum(each.count for each in matrices), sum(each.count for each in same)


def _names(module: str, name: str) -> bool:
    parts = [r"\*" if part == "*" else re.escape(part) for part in re.split(r"[._]", module)]
    return re.search(rf"(^|_){'_'.join(parts)}_", name) is not None
