"""Which weights of a checkpoint are codes: modules whose tensors are in a layout that its config names."""

from collections.abc import Mapping, Set
from dataclasses import replace

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.codes.bitsandbytes import STATE_FP4
from llmc.frontends.checkpoints.codes.expert_blocks import EXPERT_BLOCKS, find_blocks
from llmc.frontends.checkpoints.codes.layouts import OF_CACHES
from llmc.frontends.checkpoints.codes.packed_weight import PackedWeight
from llmc.frontends.checkpoints.codes.stored_scheme import (
    INTEGERS,
    StoredParts,
    StoredQuantization,
    StoredScheme,
    group_of,
)
from llmc.frontends.checkpoints.codes.unread import unread
from llmc.frontends.checkpoints.safetensors import SafetensorsSource

_INPUT_SCALE = "input_scale"
# Modules that have these store their weights in ways that are not read.
_UNREAD = {
    STATE_FP4: ("bitsandbytes' FP4", "NF4 and int8 of bitsandbytes", "bitsandbytes"),
    "pre_quant_scale": ("a scale for each channel of a product's input (pre_quant_scale)", "ModelOpt's others", ""),
}


def find_weights(files: SafetensorsSource, stored: StoredQuantization) -> tuple[dict[str, PackedWeight], set[str]]:
    """Return every quantized weight, by the model's name, and the names of tensors that are not about weights.

    Raises CheckpointError for a checkpoint without any, and for tensors that do not fit what its config says.
    """
    first = next(iter(stored.schemes))
    is_blocks = first.layout is EXPERT_BLOCKS
    unused: set[str] = set()
    weights = find_blocks(files, first) if is_blocks else _find_modules(files, stored, unused)
    if not weights:
        ending = "_blocks" if is_blocks else f".{first.layout.required[-1]}"
        raise CheckpointError(
            f"config.json declares {first.method} weights, but no tensor ends in {ending}",
            at=files.directory,
            fix="check that config.json belongs to these weights",
        )
    return weights, unused


def _find_modules(files: SafetensorsSource, stored: StoredQuantization, unused: set[str]) -> dict[str, PackedWeight]:
    weights: dict[str, PackedWeight] = {}
    for module, tensors in _modules(files, stored).items():
        suffix = next((ending for ending in _UNREAD if ending in tensors), None)
        if suffix is not None:
            seen, known, method = _UNREAD[suffix]
            raise unread(f"{seen}, which {module} has,", known, files.entry(tensors[suffix]).file, method)
        scheme = _scheme(module, tensors, files, stored)
        names = {suffix: tensors[suffix] for suffix in _read(scheme) if suffix in tensors}
        input_scale = tensors.get(_INPUT_SCALE) if scheme.is_static else None
        parts = StoredParts(files, names)
        weights[f"{module}.weight"] = _weight(module, parts, scheme, input_scale, files)
        unused |= {tensors[suffix] for suffix in scheme.layout.unused if suffix in tensors}
    unused |= {name for name in files.names() if name.rpartition(".")[2] in OF_CACHES}
    _check_unexpected(files, weights, unused)
    return weights


def _read(scheme: StoredScheme) -> tuple[str, ...]:
    return (*scheme.layout.required, *scheme.layout.optional)


def _modules(files: SafetensorsSource, stored: StoredQuantization) -> dict[str, dict[str, str]]:
    """The tensors of every module that has any but a weight, by suffix."""
    known = {suffix for scheme in stored.schemes for suffix in (*_read(scheme), *scheme.layout.unused)}
    marks = {suffix for scheme in stored.schemes for suffix in _read(scheme)} | set(_UNREAD)
    suffixes = sorted({*known, *_UNREAD}, key=len, reverse=True)
    names = files.names()
    modules: dict[str, dict[str, str]] = {}
    marked: set[str] = set()
    for name in names:
        suffix = next((ending for ending in suffixes if name.endswith(f".{ending}")), None)
        if suffix is not None:
            module = name[: -len(suffix) - 1]
            modules.setdefault(module, {})[suffix] = name
            if suffix in marks and suffix != "weight":
                marked.add(module)
    return {module: tensors for module, tensors in modules.items() if module in marked}


def _scheme(
    module: str, tensors: Mapping[str, str], files: SafetensorsSource, stored: StoredQuantization
) -> StoredScheme:
    """The one whose layout the module's tensors are in. Raises CheckpointError if there is none."""
    seen = ", ".join(sorted(tensors.values()))
    group = group_of(module, stored.groups)
    if group is None or not group.schemes:
        verdict = "no config group is for it" if group is None else f"{group.targets[0]} says that it is not quantized"
        raise CheckpointError(
            f"{module} has {seen}, but {verdict}",
            at=files.directory,
            fix="check that config.json belongs to these weights",
        )
    parts = StoredParts(files, tensors)
    chosen = next((scheme for scheme in group.schemes if scheme.layout.is_of(parts)), None)
    if chosen is not None:
        return chosen
    fitting = [scheme for scheme in group.schemes if all(suffix in tensors for suffix in scheme.layout.required)]
    if not fitting:
        # The possible layout with the most tensors present.
        nearest = max(group.schemes, key=lambda scheme: sum(suffix in tensors for suffix in scheme.layout.required))
        missing = next(suffix for suffix in nearest.layout.required if suffix not in tensors)
        raise CheckpointError(
            f"{module} has {seen} but no {module}.{missing}",
            at=files.directory,
            fix="download the whole checkpoint again",
        )
    suffix, dtypes = fitting[0].layout.codes
    entry = files.entry(tensors[suffix])
    known = " or ".join(dtypes)
    raise CheckpointError(
        f"tensor {tensors[suffix]} is {entry.dtype} {list(entry.shape)}, where codes are {known} matrices",
        at=entry.file,
        fix="check that config.json belongs to these weights",
    )


def _weight(
    module: str, parts: StoredParts, scheme: StoredScheme, input_scale: str | None, files: SafetensorsSource
) -> PackedWeight:
    """Return the packed weight of a module. Raises CheckpointError for shapes that do not fit together, and for codes
    of other bits than config.json says."""
    try:
        if scheme.layout.bits is not None:
            scheme = _with_stored_bits(module, scheme, scheme.layout.bits(parts))
        shape = scheme.layout.shape(parts, scheme)
    except ValueError as error:
        raise CheckpointError(
            f"the codes of {f'{module}.weight'!r} do not fit together: {error}",
            at=files.entry(next(iter(parts.names.values()))).file,
            fix="check that config.json belongs to these weights",
        ) from None
    return PackedWeight(f"{module}.weight", shape, parts, scheme, input_scale)


def _with_stored_bits(module: str, scheme: StoredScheme, bits: int) -> StoredScheme:
    if scheme.bits == bits:
        return scheme
    if scheme.bits is not None:
        raise ValueError(f"its tensors have {bits} bits per code, and {scheme.said} says {scheme.bits}")
    if bits not in INTEGERS:
        raise ValueError(f"its tensors have {bits} bits per code, and 2, 3, 4 and 8 are read")
    return replace(scheme, bits=bits, format=INTEGERS[bits])


def _check_unexpected(files: SafetensorsSource, weights: Mapping[str, PackedWeight], unused: Set[str]) -> None:
    """A quantized module may have a bias in addition to its codes, and no other known tensor."""
    known = {name for weight in weights.values() for name in weight.parts.names.values()} | unused
    known |= {weight.input_scale for weight in weights.values() if weight.input_scale is not None}
    for name in files.names():
        module, _, suffix = name.rpartition(".")
        if f"{module}.weight" in weights and name not in known and suffix != "bias":
            raise CheckpointError(
                f"unexpected tensor {name!r} next to {weights[f'{module}.weight'].scheme.method} codes",
                at=files.entry(name).file,
                fix="llmc reads the formats that docs/quantization.md lists; requantize with one of them",
            )
