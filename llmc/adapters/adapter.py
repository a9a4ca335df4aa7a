"""A LoRA adapter: for each module that it changes, two thin matrices and a scale."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from os import PathLike
from pathlib import Path

import numpy as np

from llmc.adapters.module_name import tail
from llmc.adapters.peft_config import CONFIG, PeftConfig, read_config
from llmc.adapters.safetensors_file import Floats, SafetensorsFile
from llmc.errors import AdapterError

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<part>[AB])(\.default)?(\.weight)?")
_WHOLE = re.compile(r"(?P<module>.+?)(\.(?P<kind>base_layer|modules_to_save|original_module)(\.default)?)?\.weight")
# Names of the weight that the adapter replaces, which the model has itself.
_UNTRAINED = "original_module"


@dataclass(frozen=True)
class LoraModule:
    """One module's change. A linear one's weight [outputs, inputs] becomes W + scale·B·A, with a: [rank, inputs] and
    b: [outputs, rank]; a table's [entries, channels] becomes W + scale·(B·A)ᵀ. name: as PEFT says it."""

    name: str
    a: str
    b: str
    rank: int
    inputs: int
    outputs: int
    scale: float
    is_table: bool


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter. modules: LoRA factors by the tail of the module's name. whole: weights that replace the model's,
    by the same tails. digest: a digest of the contents, independent of the adapter's name."""

    directory: Path
    file: SafetensorsFile
    modules: Mapping[str, LoraModule]
    whole: Mapping[str, str]
    digest: str

    def matrices(self, module: LoraModule) -> tuple[Floats, Floats]:
        """A [rank, inputs] and scale·B [outputs, rank], in float32."""
        return self.file.load(module.a), self.file.load(module.b) * module.scale


def read_adapter(directory: str | PathLike[str]) -> Adapter:
    """Read what PEFT's save_pretrained has written; matrices stay on disk until they are read.

    Which modules are adapted is read off the tensors, so that it is the same whether target_modules is a list, an
    expression or "all-linear". Raises AdapterError.
    """
    place = Path(directory)
    if not place.is_dir():
        raise AdapterError("this is not a directory", at=place, fix="name one that PEFT's save_pretrained has written")
    config = read_config(place)
    file = SafetensorsFile(_weights(place))
    shapes = file.shapes()
    parts: dict[str, dict[str, str]] = {}
    whole: dict[str, list[str]] = {}
    for name in shapes:
        bare = name.removeprefix(_PREFIX)
        match = _LORA.fullmatch(bare)
        if match is not None:
            kind = ("table " if match["embedding"] else "") + match["part"]
            parts.setdefault(match["module"], {})[kind] = name
        elif (full := _WHOLE.fullmatch(bare)) is not None:
            if full["kind"] != _UNTRAINED:
                whole.setdefault(full["module"], []).append(name)
        else:
            raise AdapterError(
                f"tensor {name!r:.120} is not part of a LoRA adapter",
                at=file.path,
                fix="save LoRA's matrices A and B, and modules_to_save, with PEFT's save_pretrained",
            )
    modules: dict[str, LoraModule] = {}
    for module, names in parts.items():
        modules[_new(tail(module), modules, file)] = _module(module, names, shapes, config, file)
    trained: dict[str, str] = {}
    for module, copies in whole.items():
        trained[_new(tail(module), trained, file)] = _one_of(copies, file)
    if not modules and not trained:
        raise AdapterError("the file holds no tensors", at=file.path, fix="save the adapter again")
    config_digest = sha256((place / CONFIG).read_bytes()).hexdigest()
    return Adapter(place, file, modules, trained, sha256(f"{config_digest} {file.digest()}".encode()).hexdigest())


def _weights(directory: Path) -> Path:
    file = directory / WEIGHTS
    if file.is_file():
        return file
    pickled = directory / "adapter_model.bin"
    raise AdapterError(
        f"the weights are a pickle file ({pickled.name}), which llmc does not open"
        if pickled.is_file()
        else f"there is no {WEIGHTS}",
        at=directory,
        fix="save the adapter again with a PEFT that writes safetensors",
    )


def _one_of(copies: Sequence[str], file: SafetensorsFile) -> str:
    """PEFT writes the trained weight of a module once or twice."""
    first, *others = copies
    for other in others:
        if not np.array_equal(file.load(first), file.load(other), equal_nan=True):
            raise AdapterError(f"{first} and {other} are one weight, and differ", at=file.path, fix="save it again")
    return first


def _new(module: str, known: Mapping[str, object], file: SafetensorsFile) -> str:
    if module in known:
        raise AdapterError(f"two modules end in {module}, so the name is ambiguous", at=file.path)
    return module


def _module(
    name: str,
    parts: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    config: PeftConfig,
    file: SafetensorsFile,
) -> LoraModule:
    is_table = "table A" in parts
    wanted = {"table A", "table B"} if is_table else {"A", "B"}
    if set(parts) != wanted:
        raise AdapterError(f"{name} has {', '.join(sorted(parts))}, not {' and '.join(sorted(wanted))}", at=file.path)
    a, b = (parts[part] for part in sorted(wanted))
    if len(shapes[a]) != 2 or len(shapes[b]) != 2 or shapes[a][0] != shapes[b][1]:
        raise AdapterError(
            f"{name} has A {list(shapes[a])} and B {list(shapes[b])}, not [rank, inputs] and [outputs, rank]",
            at=file.path,
            fix="llmc applies LoRA to linear layers and embeddings",
        )
    rank = shapes[a][0]
    if rank not in config.ranks:
        ranks = ", ".join(map(str, sorted(config.ranks)))
        raise AdapterError(f"{name} has rank {rank}, but {CONFIG} has {ranks}", at=file.path, fix="save it again")
    return LoraModule(name, a, b, rank, shapes[a][1], shapes[b][0], config.scale(name, rank), is_table)
