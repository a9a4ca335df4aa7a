"""Which files of a model directory hold its tensors: one file, or shards and an index that says where each is."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.directory_files import DOWNLOAD_AGAIN, SHARD_INDEX, SINGLE_FILE, read_json
from llmc.frontends.checkpoints.safetensors_header import TensorEntry, read_header


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a directory, by name, and notes for a build to print."""

    entries: Mapping[str, TensorEntry]
    notes: tuple[str, ...] = ()


def read_tensor_files(directory: Path) -> TensorFiles:
    """Read the headers of a directory's safetensors files.

    A single file takes precedence over shards, as in transformers. Raises CheckpointError for missing or damaged files.
    """
    single, index = directory / SINGLE_FILE, directory / SHARD_INDEX
    if index.is_file():
        shards = _shard_of_tensors(index)
        if not single.is_file() or set(shards.values()) <= {SINGLE_FILE}:
            return TensorFiles(_read_shards(directory, index, shards))
        passed_over = f"{SINGLE_FILE} is read, and the shards of {SHARD_INDEX} are not: remove the outdated files"
        return TensorFiles(read_header(single), (passed_over,))
    if single.is_file():
        return TensorFiles(read_header(single))
    raise _no_weights(directory)


def _no_weights(directory: Path) -> CheckpointError:
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
    if pickled:
        return CheckpointError(
            f"the weights are pickle files ({', '.join(pickled[:3])}), which llmc does not open",
            at=directory,
            fix="convert them: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT) writes safetensors",
        )
    others = sorted(file.name for file in directory.glob("*.safetensors"))
    if others:
        return CheckpointError(
            f"there are {', '.join(others[:3])}, but neither {SINGLE_FILE} nor {SHARD_INDEX}",
            at=directory,
            fix=f"download the index too, or rename a single file to {SINGLE_FILE}",
        )
    return CheckpointError(
        f"no weights: neither {SINGLE_FILE} nor {SHARD_INDEX} is there",
        at=directory,
        fix="download the weights too, or pass the directory that holds them",
    )


def _shard_of_tensors(index: Path) -> dict[str, str]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise CheckpointError("the shard index has no weight_map of names to files", at=index, fix=DOWNLOAD_AGAIN)
    return shards


def _read_shards(directory: Path, index: Path, shard_of: Mapping[str, str]) -> dict[str, TensorEntry]:
    """Read each tensor's entry from the shard that the index names for it, whatever other shards have under its name.

    A tensor that the index does not name, or names for a shard that does not have it, is read from the only shard that
    has it.
    """
    held: dict[str, dict[str, TensorEntry]] = {}
    for shard in sorted(set(shard_of.values())):
        for name, entry in read_header(_shard_file(directory, index, shard)).items():
            held.setdefault(name, {})[shard] = entry
    missing = sorted(shard_of.keys() - held.keys())
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors named by the index are in no shard, first {missing[0]!r}",
            at=index,
            fix=DOWNLOAD_AGAIN,
        )
    return {name: _chosen(name, shards, shard_of.get(name), index) for name, shards in held.items()}


def _chosen(name: str, shards: Mapping[str, TensorEntry], named: str | None, index: Path) -> TensorEntry:
    if named is not None and named in shards:
        return shards[named]
    if len(shards) == 1:
        return next(iter(shards.values()))
    claim = "names it for none" if named is None else f"names it for {named}, which has no such tensor"
    raise CheckpointError(
        f"tensor {name!r} is in {' and '.join(sorted(shards))}, and the index {claim}",
        at=index,
        fix="remove shards that do not belong to this checkpoint, or correct the index",
    )


def _shard_file(directory: Path, index: Path, shard: str) -> Path:
    file = directory / shard
    if not shard.isprintable() or not file.name:
        raise CheckpointError(f"the shard index names no file: {shard!r:.80}", at=index, fix=DOWNLOAD_AGAIN)
    if not file.resolve().is_relative_to(directory.resolve()) and "/" in shard:
        raise CheckpointError(f"the shard index names a file outside its directory: {shard!r}", at=index)
    try:
        is_there = file.is_file()
    except OSError as error:  # e.g. a name that is too long
        raise CheckpointError(
            f"shard {shard:.80} cannot be read: {error.strerror}", at=index, fix=DOWNLOAD_AGAIN
        ) from None
    if not is_there:
        raise CheckpointError(f"shard {shard} is missing", at=file, fix="download the missing shard")
    return file
