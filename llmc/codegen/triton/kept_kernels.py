"""Compiled kernels, kept under LLMC_CACHE_DIR/gpu-kernels and found again by all that they were compiled from.

Triton keeps what it compiles, too, but asking it takes a process that imports it, reads the kernel's source and runs
the toolkit's programs.
"""

import base64
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from llmc.cache import CacheKind, open_cache
from llmc.cache.installed_version import installed_version
from llmc.cache.source_digest import source_digest

# What kernels import, and what compiles them.
_ROOMS = ("codegen", "formats", "ops", "program", "processes")
_ENVIRONMENT = "TRITON_"
# What each compiling process is told otherwise.
_REPLACED = ("TRITON_CACHE_DIR", "TRITON_INTERPRET")


def kernel_entry(request: Mapping[str, Any]) -> str:
    """The name in the cache of what a request to a compiling process (compile_worker.py) makes."""
    parts = {
        **{name: value for name, value in request.items() if name not in ("source", "output")},
        "source": Path(request["source"]).read_text(encoding="utf-8"),
        "llmc": source_digest(_ROOMS),
        "triton": installed_version("triton"),
        "environment": sorted(
            each for each in os.environ.items() if each[0].startswith(_ENVIRONMENT) and each[0] not in _REPLACED
        ),
    }
    return f"{sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]}.json"


def find_kernel(entry: str, output: str) -> dict[str, Any] | None:
    """Write a kept kernel's binary and assembly to the path `output` with their suffixes; the answer of the process
    that compiled it, or None if there is none that is whole."""
    text = open_cache(CacheKind.GPU_KERNELS).read_text(entry)
    if text is None:
        return None
    answer, *files = json.loads(text)
    for suffix, content in files:
        Path(f"{output}{suffix}").write_bytes(base64.b64decode(content))
    return {**answer, "assembly": f"{output}{answer['assembly']}"}


def keep_kernel(entry: str, answer: Mapping[str, Any], binary: Path) -> None:
    """Keep what was compiled just now; a full disk is passed over."""
    assembly = Path(answer["assembly"])
    files = [(path.suffix, base64.b64encode(path.read_bytes()).decode()) for path in (binary, assembly)]
    with suppress(OSError):
        kept = json.dumps([{**answer, "assembly": assembly.suffix}, *files])
        open_cache(CacheKind.GPU_KERNELS).write_text(entry, kept)
