"""A cache of captures of model directories under LLMC_CACHE_DIR/captures, keyed by their inputs.

Importing transformers and tracing the model takes half of a small model's build. The key covers the config, the names,
types and shapes of the tensors (including codes and masks), the requested dtype, llmc's sources, and the installed
packages. An entry also names the files of transformers that it depends on, which must not have changed. A damaged entry
is made again.

Only a process that has not imported transformers uses the cache: in any other its classes may have been patched, unless
LLMC_CAPTURE_CACHE=always says that they are not. LLMC_CAPTURE_CACHE=0 turns it off.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from llmc.cache import CacheKind, open_cache
from llmc.cache.source_digest import source_digest
from llmc.errors import CheckpointError, EngineFormatError
from llmc.frontends.checkpoints.checkpoint_source import CheckpointSource
from llmc.frontends.front_end import OpenedModel
from llmc.frontends.transformers.capture_text import captured_graph, captured_text
from llmc.frontends.transformers.tied_copies import Copies, compared
from llmc.graph.model_graph import ModelGraph
from llmc.options import OWN_LAYERS, BuildOptions
from llmc.settings import CaptureCache, settings

_CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
_MODULE_CONFIGS = "[0-9]*_*/config.json"
OWN_ROOMS = ("adapters", "api", "frontends", "graph", "ops", "program", "formats", "files", "targets")
# Settings that may change the trace.
_ENVIRONMENT = ("TRANSFORMERS_", "TORCH", "PYTORCH_")
_PACKAGE = "transformers"
_PAIRS = "ForSequenceClassification"


def capture_entry(
    model: OpenedModel[CheckpointSource], options: BuildOptions, *, has_weights: bool = True
) -> str | None:
    """The name of a directory's capture in the cache; None if it is not to be kept, or not by this process."""
    directory: Path = model.given
    chosen, spec = settings().capture_cache, find_spec(_PACKAGE)
    is_allowed = chosen is CaptureCache.ALWAYS or (chosen is CaptureCache.CLEAN and _PACKAGE not in sys.modules)
    if not is_allowed or spec is None or spec.origin is None:
        return None
    try:
        tensors = model.weights.headers() if has_weights else None
    except CheckpointError:
        return None  # The capture will say what is wrong.
    parts = {
        "model": {name: _text(directory / name) for name in _CONFIG_FILES},
        "modules": {file.parent.name: _text(file) for file in sorted(directory.glob(_MODULE_CONFIGS))},
        "task": [options.task, options.pooling],
        "tokenizer": _tokenizer(directory) if options.task in ("auto", "score") else None,
        "tensors": tensors,
        "dtype": options.dtype,
        "longest": options.max_model_len if _follows_length(directory) else None,
        "own_layers": options.speculative == OWN_LAYERS,
        "llmc": source_digest(OWN_ROOMS),
        "torch": [torch.__version__, torch.version.git_version, str(torch.get_default_dtype())],
        "python": sys.version,
        # Constants are computed with the processor's vector instructions.
        "processor": torch.backends.cpu.get_cpu_capability(),
        # Installing, removing or upgrading any package changes the folder.
        "packages": [_stamp(Path(path).parents[1]) for path in (spec.origin, torch.__file__)],
        "environment": sorted(variable for variable in os.environ.items() if variable[0].startswith(_ENVIRONMENT)),
    }
    digest = sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{digest[:32]}.txt"


@dataclass(frozen=True)
class KeptCapture:
    """A captured graph without its model's name, and notes for a build to print.

    copies: what was found when tensors were compared that the checkpoint holds twice. Which are tied depends on it.
    """

    graph: ModelGraph
    notes: tuple[str, ...]
    copies: tuple[Copies, ...]

    def is_of(self, source: CheckpointSource) -> bool:
        """Whether the same copies are equal in this checkpoint, whose headers are the same."""
        return compared([(copy.first, copy.second) for copy in self.copies], source) == self.copies


def find_capture(entry: str) -> KeptCapture | None:
    """Load an entry; None if none is complete and up to date."""
    cache = open_cache(CacheKind.CAPTURES)
    try:
        known, _, text = (cache.read_text(entry) or "").partition("\n")
        sources, notes, copies = json.loads(known)
        if any(_stamp(Path(path)) != [path, *stamp] for path, *stamp in sources):
            return None
        graph = captured_graph(text, cache.path / entry)
        return KeptCapture(graph, tuple(notes), tuple(Copies(*copy) for copy in copies))
    except (OSError, ValueError, EngineFormatError):
        return None


def keep_capture(entry: str, graph: ModelGraph, notes: Sequence[str] = (), copies: Sequence[Copies] = ()) -> None:
    """Store a captured graph with its notes and the tensors that were compared. A graph that cannot be written as text,
    and a full disk, are ignored."""
    text = captured_text(graph)
    if text is None:
        return
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == _PACKAGE]
    files = sorted({file for module in modules if isinstance(file := getattr(module, "__file__", None), str)})
    known = json.dumps([[_stamp(Path(file)) for file in files], list(notes), [astuple(copy) for copy in copies]])
    with suppress(OSError):
        open_cache(CacheKind.CAPTURES).write_text(entry, f"{known}\n{text}")


def _tokenizer(directory: Path) -> str | None:
    """The digest of the tokenizer, for a model that may read pairs, whose segments depend on it
    (heads/separator.py)."""
    file = directory / "tokenizer.json"
    reads_pairs = _PAIRS in (_text(directory / "config.json") or "") and file.is_file()
    return sha256(file.read_bytes()).hexdigest() if reads_pairs else None


def _follows_length(directory: Path) -> bool:
    """Whether its rotary frequencies depend on the longest sequence (rotary_lengths.py)."""
    return "long_factor" in (_text(directory / "config.json") or "")


def _text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8", errors="surrogateescape") if file.is_file() else None


def _stamp(path: Path) -> list[Any]:
    """A stamp that changes when a file or folder changes."""
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns, status.st_ino]
