"""Which checkpoint tensor each parameter and saved buffer of a transformers model is loaded from."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from llmc.errors import CheckpointError
from llmc.graph.checkpoint import SafetensorsSource
from llmc.graph.quantized_checkpoint import QuantizedSource
from llmc.graph.weights import Recipe, Stored


def stored_recipes(model: Any, source: SafetensorsSource | QuantizedSource) -> dict[str, Recipe]:
    """A Stored recipe for every parameter and saved buffer, by its name in the model; tied ones get equal recipes.

    Raises CheckpointError that names tensors which the checkpoint lacks, or whose shape or type does not fit.
    """
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)

    available = {name: name for name in source.names()}
    found = _match(groups, available, model.base_model_prefix)
    if len(found) < len(groups):
        # Renames are looked at only where names do not fit as they are: most checkpoints do.
        found = _match(groups, _renamed(model, source.names()) | available, model.base_model_prefix)
    missing = [group[0] for key, group in groups.items() if key not in found]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of the model's {len(groups)} tensors: {', '.join(missing[:4])}"
            + (", …" if len(missing) > 4 else ""),
            at=source.directory,
            fix="check that config.json belongs to these weights and that all shards are there",
        )
    recipes: dict[str, Recipe] = {}
    for key, group in groups.items():
        tensor = tensors[group[0]]
        source.check(found[key], tuple(tensor.shape), floating=tensor.is_floating_point())
        recipes.update((name, Stored(found[key], tensor.dtype)) for name in group)
    return recipes


def _match(groups: dict[int, list[str]], available: dict[str, str], base_prefix: str) -> dict[int, str]:
    """The stored name of each group of tied tensors; a checkpoint may lack the bare model's prefix or have it too."""
    prefix = f"{base_prefix}."
    found: dict[int, str] = {}
    for key, group in groups.items():
        candidates = [c for name in group for c in (name, name.removeprefix(prefix), prefix + name)]
        stored = next((available[c] for c in candidates if c in available), None)
        if stored is not None:
            found[key] = stored
    return found


def _renamed(model: Any, stored: tuple[str, ...]) -> dict[str, str]:
    """Stored names by what transformers calls them today (LayerNorm.gamma, embed_out, … of older checkpoints)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamings = [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)]
    result: dict[str, str] = {}
    for name in stored:
        current = name
        for renaming in renamings:
            current, _ = renaming.rename_source_key(current)
        result[current] = name
    return result
