"""Where a model is on this machine: a directory or an ONNX file as it is, a hub name's snapshot, and what is made of a
GGUF file."""

from os import PathLike
from pathlib import Path

from llmc.files.hub_model import fetched_model
from llmc.frontends.gguf import SUFFIX


def local_model(model: str | PathLike[str], *, weights: bool = True) -> Path:
    """The directory of a path, of a .gguf file, or of a hub name, which is fetched first; an .onnx file itself.

    weights: False fetches only what describes the model. Raises CheckpointError for a file that is not read, and for
    what the hub does not have or does not give.
    """
    place = fetched_model(model, weights=weights)
    if place.suffix != SUFFIX or place.is_dir():
        return place
    # Takes numpy, and a directory does without.
    from llmc.frontends.gguf.model_directory import gguf_directory

    return gguf_directory(place)
