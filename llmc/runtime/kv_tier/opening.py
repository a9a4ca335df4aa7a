"""Open the second tier of an engine: where its blocks go, and whether there is room for them."""

import shutil
from hashlib import sha256

from llmc.api.version import VERSION
from llmc.cache.trust import make_private
from llmc.engine_format import EngineDirectory
from llmc.engine_format.engine_kinds import ExecutorName
from llmc.engine_format.manifest import manifest_text
from llmc.errors import OptionError
from llmc.files.scratch_directory import ScratchDirectory
from llmc.files.storage_error import ELSEWHERE_CACHED, storage_error
from llmc.runtime.kv_tier.block_files import FORMAT, BlockFiles
from llmc.runtime.kv_tier.block_store import BlockStore
from llmc.runtime.kv_tier.host_blocks import HostBlocks
from llmc.runtime.kv_tier.tier import Tier
from llmc.runtime.kv_tier.wish import OffloadingWish
from llmc.runtime.memory import available_bytes
from llmc.settings import settings
from llmc.targets.here import host_features

# Executors of GPU engines, whose caches are on a device or emulate such caches.
_ON_DEVICE: tuple[ExecutorName, ...] = ("cuda", "onnxruntime_cuda", "ptx", "triton_interpreter")


def open_tier(wish: OffloadingWish, engine: EngineDirectory, executor: ExecutorName) -> Tier:
    """Open a tier for an engine that this executor runs.

    Raises OptionError if the engine cannot use a tier or the tier has no room, and EngineFormatError if its files
    cannot be written.
    """
    _check_engine(engine)
    block_bytes = engine.program.block_bytes()
    store = _open_store(wish, engine, executor)
    least = sum(nbytes + store.overhead for nbytes in block_bytes)
    if wish.size < least:
        store.close()
        raise OptionError(
            f"the second tier gets {wish.size} bytes, and one block of {engine.program.limits.block_size} tokens takes "
            f"{least}",
            at=f"kv_offloading_size={wish.given!r}",
            fix=f"give {least} bytes or more, with a unit, such as 4GiB",
        )
    return Tier(store, wish.size, block_bytes)


def _check_engine(engine: EngineDirectory) -> None:
    """Raises OptionError for a kind of engine whose blocks do not leave the cache."""
    program, head = engine.program, engine.manifest.model.head
    refusal: str | None = None
    if head is not None:
        refusal = f"the engine is built for {head.task.value}, which keeps no blocks from text to text"
    elif program.states:
        refusal = f"the model has {len(program.states)} recurrent states, which do not go to the second tier yet"
    elif program.layout.ranks > 1:
        refusal = f"the engine has {program.layout.ranks} ranks, whose blocks do not go to the second tier yet"
    if refusal is not None:
        raise OptionError(refusal, at="kv_offloading_size", fix="leave it out")


def _open_store(wish: OffloadingWish, engine: EngineDirectory, executor: ExecutorName) -> BlockStore:
    identity = engine_identity(engine, executor)
    if wish.directory is None and executor in _ON_DEVICE:
        _check_room(wish, available_bytes(), "this machine's memory", "give a smaller kv_offloading_size")
        return HostBlocks()
    elsewhere = "name another directory: kv_offloading_dir"
    if wish.directory is None:
        make_private(settings().cache_dir)
        scratch = ScratchDirectory(settings().cache_dir, "kv-blocks")
        store, elsewhere = BlockFiles(scratch.path / "blocks", identity, scratch), f"{ELSEWHERE_CACHED} on another disk"
        place, used = scratch.path, 0
    else:
        place = wish.directory.absolute() / identity.hex()[:32]
        try:
            store = BlockFiles(place, identity)
        except BlockingIOError:
            raise OptionError(
                "another process keeps this engine's blocks in that directory",
                at=f"kv_offloading_dir={str(wish.directory)!r}",
                fix="name another directory, or end that process",
            ) from None
        except OSError as error:
            content = "the second tier's blocks"
            raise storage_error(error, wish.directory, content=content, elsewhere="choose a directory") from None
        used = sum(entry.stat().st_size for entry in place.iterdir() if entry.is_file())
    try:
        free = shutil.disk_usage(place).free + used
        _check_room(wish, free, str(place), f"free some space, give a smaller kv_offloading_size, or {elsewhere}")
    except BaseException:
        store.close()
        raise
    return store


def _check_room(wish: OffloadingWish, free: int, where: str, fix: str) -> None:
    if wish.size > free:
        raise OptionError(
            f"the second tier is to hold {wish.size} bytes, and {free} are free in {where}",
            at=f"kv_offloading_size={wish.given!r}",
            fix=fix,
        )


def engine_identity(engine: EngineDirectory, executor: ExecutorName) -> bytes:
    """A digest of everything that determines the bytes of a block: the engine's content, the executor, and the features
    of the machine that the executor uses."""
    parts = (str(FORMAT), VERSION, manifest_text(engine.manifest), executor, _machine(executor))
    digest = sha256()
    for part in parts:
        digest.update(sha256(part.encode()).digest())
    return digest.digest()


def _machine(executor: ExecutorName) -> str:
    """A compiled library has the same instructions on every machine; libraries of others choose theirs."""
    if executor == "cpp":
        return ""
    if executor in ("cuda", "onnxruntime_cuda"):
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return " ".join(sorted(host_features()))
