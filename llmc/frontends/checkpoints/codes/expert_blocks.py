"""Experts of gpt-oss: NAME_blocks, uint8 [experts, out, in / 32, 16], and NAME_scales without the last axis."""

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.codes.packed_weight import PackedWeight
from llmc.frontends.checkpoints.codes.stored_scheme import CodeLayout, StoredParts, StoredScheme
from llmc.frontends.checkpoints.codes.unpack_codes import powers_of_two, unpack_fp4
from llmc.frontends.checkpoints.safetensors import SafetensorsSource
from llmc.graph.stored_codes import UnpackedCodes


def _shape(parts: StoredParts, scheme: StoredScheme) -> tuple[int, int]:
    experts, rows, groups, half = parts.shape("blocks")
    return experts * rows, groups * 2 * half


def _unpack(parts: StoredParts, shape: tuple[int, int], scheme: StoredScheme) -> UnpackedCodes:
    blocks, scales = (parts.load(suffix).reshape(shape[0], -1) for suffix in EXPERT_BLOCKS.required)
    return unpack_fp4(blocks, powers_of_two(scales))


# Suffixes that are appended to the names of matrices.
EXPERT_BLOCKS = CodeLayout(("blocks", "scales"), (), _shape, _unpack)


def find_blocks(files: SafetensorsSource, scheme: StoredScheme) -> dict[str, PackedWeight]:
    """Return every such matrix. Raises CheckpointError for one whose tensors do not fit."""
    packed: dict[str, PackedWeight] = {}
    for blocks in files.names():
        name = blocks.removesuffix("_blocks")
        if name == blocks:
            continue
        scales, shape = f"{name}_scales", files.shape(blocks)
        seen = files.shape(scales) if scales in files.names() else None
        if len(shape) != 4 or seen != shape[:3]:
            beside = "is missing" if seen is None else str(list(seen))
            raise CheckpointError(
                f"tensor {blocks!r} has shape {list(shape)} and {scales!r} {beside}, where blocks are [experts, out, "
                "groups, bytes] and scales have all but the last",
                at=files.entry(blocks).file,
                fix="download the whole checkpoint again",
            )
        parts = StoredParts(files, {"blocks": blocks, "scales": scales})
        packed[name] = PackedWeight(name, _shape(parts, scheme), parts, scheme, None, shape[0])
    return packed
