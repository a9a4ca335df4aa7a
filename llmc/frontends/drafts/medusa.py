"""Medusa heads as they are published, in safetensors: which tensors are which head's.

    Medusa-1   {head}.{layer}.linear.{weight,bias} and {head}.{layers}.weight, the head's own output matrix
    Medusa-2   the same with `medusa_head.` before them, among the model's own tensors
    vLLM       blocks.{head}.layers.{layer}.{weight,bias}, lm_heads.{head}.weight or lm_head.weight, token_map
Tensors are counted and configurations are not read: published ones say 2 heads and hold 5. Reading is of headers only.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.directory_files import SINGLE_FILE
from llmc.frontends.checkpoints.safetensors import SafetensorsSource
from llmc.frontends.checkpoints.safetensors_header import TensorEntry, read_header
from llmc.graph.draft_records import MedusaBlock, MedusaCheckpoint, MedusaHead

_FILES = ("medusa_lm_head.safetensors", "heads.safetensors", SINGLE_FILE)
_PICKLES = (".pt", ".bin", ".pth")
_PREFIX = "medusa_head."
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)|blocks\.(\d+)\.layers\.(\d+)\.(?:linear\.)?(weight|bias)")
_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight|lm_heads\.(\d+)\.weight")
_SHARED_OUTPUT, _TOKEN_MAP = "lm_head.weight", "token_map"
_CONVERT = (
    'convert it once, in a place that you trust it in: python -c "import sys, torch, safetensors.torch as s; '
    "s.save_file({{k: v.clone().contiguous() for k, v in torch.load(sys.argv[1], weights_only=True).items()}}, "
    'sys.argv[2])" {file} {file.stem}.safetensors'
)


def holds_medusa(path: Path) -> bool:
    """Whether a path names Medusa heads, readable or not, and not a directory of another draft."""
    if not path.is_dir():
        return path.suffix in (".safetensors", *_PICKLES)
    if any((path / f"medusa_lm_head{suffix}").is_file() for suffix in (".safetensors", *_PICKLES)):
        return True
    file = next((path / name for name in _FILES if (path / name).is_file()), None)
    return file is not None and any(_BLOCK.fullmatch(name.removeprefix(_PREFIX)) for name in read_header(file))


def read_medusa(path: Path) -> MedusaCheckpoint:
    """Read the heads of a file, or of a directory that holds one. Raises CheckpointError with the fix if there are
    none."""
    file = _file(path)
    entries = read_header(file)
    if any(name.startswith(_PREFIX) for name in entries):
        entries = {name: entry for name, entry in entries.items() if name.startswith(_PREFIX)}
    blocks, outputs = _sorted_by_head(entries)
    if not blocks:
        names = ", ".join(list(entries)[:3])
        raise CheckpointError(
            f"the file holds no Medusa heads: its {len(entries)} tensors are {names}, …",
            at=file,
            fix="give heads with keys such as 0.0.linear.weight or blocks.0.layers.0.weight, or train "
            "some: llmc train-medusa ENGINE --text FILE -o heads.safetensors",
        )
    shared = next((name for name in entries if name.removeprefix(_PREFIX) == _SHARED_OUTPUT), None)
    heads = tuple(_head(index, blocks, outputs, shared, file) for index in range(1 + max((*blocks, *outputs))))
    token_map = next((name for name in entries if name.removeprefix(_PREFIX) == _TOKEN_MAP), None)
    return MedusaCheckpoint(file, heads, token_map, SafetensorsSource(file.parent, entries))


def _file(path: Path) -> Path:
    if path.is_dir():
        file = next((path / name for name in _FILES if (path / name).is_file()), None)
        if file is not None:
            return file
        several = sorted(path.glob("*.safetensors"))
        if len(several) == 1:
            return several[0]
        path = next((p for suffix in _PICKLES for p in sorted(path.glob(f"*{suffix}"))), path)
    if path.suffix in _PICKLES:
        raise CheckpointError(
            "the heads are a pickle file, which llmc does not open", at=path, fix=_CONVERT.format(file=path)
        )
    if not path.is_file():
        raise CheckpointError(
            "there are no Medusa heads", at=path, fix=f"give a .safetensors file, or a directory with {_FILES[0]}"
        )
    return path


Blocks = dict[int, dict[int, dict[str, str]]]


def _sorted_by_head(entries: Mapping[str, TensorEntry]) -> tuple[Blocks, dict[int, tuple[int | None, str]]]:
    """The tensors of each layer by head, and the output matrix with the number of layers before it, if its name has
    it."""
    blocks: Blocks = {}
    outputs: dict[int, tuple[int | None, str]] = {}
    for name in entries:
        plain = name.removeprefix(_PREFIX)
        block, output = _BLOCK.fullmatch(plain), _OUTPUT.fullmatch(plain)
        if block is not None:
            head, layer, kind = (part for part in block.groups() if part is not None)
            blocks.setdefault(int(head), {}).setdefault(int(layer), {})[kind] = name
        elif output is not None:
            head, layers, other = output.groups()
            outputs[int(head or other)] = None if layers is None else int(layers), name
    return blocks, outputs


def _head(
    index: int, blocks: Blocks, outputs: Mapping[int, tuple[int | None, str]], shared: str | None, file: Path
) -> MedusaHead:
    head_blocks = blocks.get(index, {})
    stated, output = outputs.get(index, (None, shared))
    layers = max((*(layer + 1 for layer in head_blocks), stated or 0))
    if not head_blocks or (len(head_blocks) < layers and len(head_blocks) > 1):
        missing = next((layer for layer in range(layers) if layer not in head_blocks), 0)
        raise CheckpointError(
            f"head {index} has no layer {missing}: {len(head_blocks)} of {layers} are there",
            at=file,
            fix="download the whole checkpoint again",
        )
    # Safetensors keeps one copy of a block that all layers share, as in the reference implementation.
    only = next(iter(head_blocks.values()))
    return MedusaHead(
        tuple(_block(head_blocks.get(layer, only), index, layer, file) for layer in range(layers)), output
    )


def _block(names: Mapping[str, str], head: int, layer: int, file: Path) -> MedusaBlock:
    if "weight" not in names:
        raise CheckpointError(
            f"layer {layer} of head {head} has a bias and no weight",
            at=file,
            fix="download the whole checkpoint again",
        )
    return MedusaBlock(names["weight"], names.get("bias"))
