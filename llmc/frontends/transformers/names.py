"""Which checkpoint tensor each parameter and saved buffer of a transformers model is loaded from."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.checkpoint_source import StoredShapes
from llmc.frontends.transformers.converters import Converted, converted_tensors
from llmc.frontends.transformers.text_half import text_names
from llmc.graph.weights import Recipe, Stored, stored_names


@dataclass(frozen=True)
class StoredNames:
    """Where a model's tensors are stored.

    Args:
        recipes: by the names of the model's tensors; tied ones have equal recipes.
        notes: on tensors that nothing reads, for a build to print.
        copies: pairs of stored tensors for one tensor of the model; the first is read.
    """

    recipes: dict[str, Recipe]
    notes: tuple[str, ...]
    copies: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Found:
    """The names that match a checkpoint. recipes: by the names of a model's tensors. read: the checkpoint's tensors in
    them. names: all stored names, by the model's names. copies: as in StoredNames."""

    recipes: dict[str, Recipe]
    read: frozenset[str]
    names: Mapping[str, str]
    copies: tuple[tuple[str, str], ...]


def stored_recipes(
    model: Any,
    source: StoredShapes,
    *,
    whole: Callable[[], Any | None] | None = None,
    read_elsewhere: Collection[str] = (),
) -> StoredNames:
    """A Stored recipe for every parameter and saved buffer.

    whole: makes the multimodal model that the checkpoint is of, if it can be made, where `model` is its text half; the
    other halves are passed over. read_elsewhere: tensors that are used but not part of the model.
    Raises CheckpointError that names tensors which the checkpoint lacks, or whose shape or type does not fit, and for a
    checkpoint most of which nothing reads.
    """
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    names = {name: name for name in source.names()}
    matched = _found(model, names if whole is None else text_names(names), source, renamed=whole is None)
    if whole is not None and matched.recipes.keys() != tensors.keys():
        # Its own names and converters are those of the whole: they are used if the text half's do not fit.
        outer = whole()
        matched = matched if outer is None else _text_half(_found(outer, names, source), outer, tensors)
    missing = [group[0] for group in _groups(tensors) if group[0] not in matched.recipes]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of the model's {len(_groups(tensors))} tensors: {_named(missing)}",
            at=source.directory,
            fix=_TIE_IT
            if missing == [_OUTPUT]
            else "check that config.json belongs to these weights and that all shards are there",
        )
    read = {*matched.read, *read_elsewhere}
    unread = _unread(model, matched.names, tensors.keys(), read)
    if len(unread) > len(read):
        raise CheckpointError(
            f"the model reads {len(read)} of the checkpoint's tensors, and not these {len(unread)}: {_named(unread)}",
            at=source.directory,
            fix="check that config.json belongs to these weights, for example its num_hidden_layers",
        )
    are = "tensor of the checkpoint is" if len(unread) == 1 else "tensors of the checkpoint are"
    notes = (f"{len(unread)} {are} not used: {_named(unread)}",) if unread else ()
    return StoredNames(matched.recipes, notes, matched.copies)


_OUTPUT = "lm_head.weight"
_TIE_IT = "download the whole checkpoint, or, if the embeddings are the output matrix, set tie_word_embeddings to true"


def _groups(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names, those of tied tensors together."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def _found(model: Any, names: Mapping[str, str], source: StoredShapes, *, renamed: bool = True) -> _Found:
    """The tensors of a checkpoint for a model. names: stored names, by possible names in the model. renamed: also look
    for tensors under the names of older checkpoints."""
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    groups = _groups(tensors)
    available = names
    matches = _match(groups, available, model.base_model_prefix)
    matched = {tensor_name for stored in matches.values() for tensor_name in stored}
    if renamed and (len(matches) < len(groups) or names.keys() - matched):
        # Renames are considered only if names do not fit as they are, or some are left: most checkpoints do.
        available = {**_renamed(model, source.names()), **names}
        matches = _match(groups, available, model.base_model_prefix)
    recipes, sources = _converted(model, [group for group in groups if group[0] not in matches], names, source)
    for group in groups:
        if group[0] in matches:
            tensor, where = tensors[group[0]], matches[group[0]][0]
            source.check(where, tuple(tensor.shape), floating=tensor.is_floating_point())
            recipes.update((name, Stored(where, tensor.dtype)) for name in group)
    read = frozenset({*(stored[0] for stored in matches.values()), *sources})
    copies = tuple((stored[0], other) for stored in matches.values() for other in stored[1:])
    return _Found(recipes, read, available, copies)


def _text_half(matched: _Found, whole: Any, tensors: Mapping[str, Tensor]) -> _Found:
    """The part of the tensors found for `whole` that belongs to its text half `tensors`."""
    outer_names = text_names(whole.state_dict())
    recipes: dict[str, Recipe] = {}
    for group in _groups(tensors):
        recipe = next(
            (matched.recipes[outer_names[name]] for name in group if outer_names.get(name) in matched.recipes), None
        )
        if recipe is not None:
            recipes.update((name, recipe) for name in group)
    names = {name: matched.names[place] for name, place in text_names(matched.names).items()}
    read = frozenset(name for made in recipes.values() for name in stored_names(made))
    return _Found(recipes, read, names, tuple(pair for pair in matched.copies if pair[0] in read))


# Buffers that older versions of transformers saved, and that a model computes by itself.
_COMPUTED = (
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$",
    r"\.masked_bias$",
    r"attn\.bias$",
    r"attention\.bias$",
    r"position_ids$",
)


def _unread(model: Any, available: Mapping[str, str], known: Iterable[str], used: set[str]) -> list[str]:
    """Return the stored tensors that are not read, except redundant ones: copies of tied tensors, and computed
    buffers."""
    prefix = f"{model.base_model_prefix}."
    tied = {alias for name in known for alias in (name, name.removeprefix(prefix), prefix + name)}
    ignored = (*_COMPUTED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))
    unread = {stored for name, stored in available.items() if name not in tied} - used
    return sorted(name for name in unread if not any(re.search(pattern, name) for pattern in ignored))


def _converted(
    model: Any, groups: Sequence[list[str]], stored: Mapping[str, str], source: StoredShapes
) -> tuple[dict[str, Recipe], set[str]]:
    """The recipes of transformers' converters for these groups, and the tensors that they read."""
    recipes: dict[str, Recipe] = {}
    sources: set[str] = set()
    if groups:
        shapes = {name: source.shape(where) for name, where in stored.items()}
        converted = converted_tensors(model, shapes, source.directory)
        tensors = model.state_dict(keep_vars=True)
        for group in groups:
            conversion = next((converted[name] for name in group if name in converted), None)
            if conversion is not None:
                _check_converted(group[0], conversion, tensors[group[0]], stored, source)
                recipes.update((name, conversion.recipe) for name in group)
                sources.update(stored[name] for name in conversion.sources)
    return recipes, sources


def _check_converted(
    name: str, made: Converted, tensor: Tensor, stored: Mapping[str, str], source: StoredShapes
) -> None:
    for part in made.sources:
        source.check(stored[part], source.shape(stored[part]), floating=tensor.is_floating_point())
    if made.shape != tuple(tensor.shape):
        raise CheckpointError(
            f"{name} comes out of {made.sources[0]} and others as {list(made.shape)}, but config.json gives it "
            f"the shape {list(tensor.shape)}",
            at=source.directory,
            fix="check that config.json belongs to these weights",
        )


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def _match(groups: Sequence[list[str]], available: Mapping[str, str], base_prefix: str) -> dict[str, tuple[str, ...]]:
    """The stored names for each group of tied tensors, by its first name; the first stored one is read. A checkpoint
    may lack or have the bare model's prefix."""
    prefix = f"{base_prefix}."
    matched: dict[str, tuple[str, ...]] = {}
    for group in groups:
        candidates = [c for name in group for c in (name, name.removeprefix(prefix), prefix + name)]
        stored = tuple(dict.fromkeys(available[c] for c in candidates if c in available))
        if stored:
            matched[group[0]] = stored
    return matched


def _renamed(model: Any, stored: tuple[str, ...]) -> dict[str, str]:
    """Map current names in transformers to stored names (LayerNorm.gamma, embed_out, … of older checkpoints)."""
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
