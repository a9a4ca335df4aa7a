"""The cache of compiled kernels under LLMC_CACHE_DIR/gpu-kernels, keyed by everything that affects compilation.

Triton has its own cache, but a lookup there takes a process that imports Triton, reads the kernel's source and runs
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

# The packages that kernels import, and the ones that compile them.
_ROOMS = ("codegen", "formats", "ops", "program", "processes")
_ENVIRONMENT = "TRITON_"
# Variables that are set for each compiling process, whatever their value here.
_REPLACED = ("TRITON_CACHE_DIR", "TRITON_INTERPRET")


def kernel_entry(request: Mapping[str, Any]) -> str:
    """The cache entry for a request to a compiling process (compile_worker.py)."""
    parts = {
        **{name: value for name, value in request.items() if name not in ("source", "output")},
        "source": Path(request["source"]).read_text(encoding="utf-8"),
        "llmc": source_digest(_ROOMS),
        "triton": installed_version("triton"),
        "environment": sorted(
            variable
            for variable in os.environ.items()
            if variable[0].startswith(_ENVIRONMENT) and variable[0] not in _REPLACED
        ),
    }
    return f"{sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]}.json"


def find_kernel(entry: str, output: str) -> dict[str, Any] | None:
    """Write a cached kernel's binary and assembly to the path `output` with their suffixes. Returns the answer of the
    process that compiled it, or None if the entry is missing or incomplete."""
    text = open_cache(CacheKind.GPU_KERNELS).read_text(entry)
    if text is None:
        return None
    answer, *files = json.loads(text)
    for suffix, content in files:
        Path(f"{output}{suffix}").write_bytes(base64.b64decode(content))
    return {**answer, "assembly": f"{output}{answer['assembly']}"}


def keep_kernel(entry: str, answer: Mapping[str, Any], binary: Path) -> None:
    """Write a kernel that was just compiled to the cache; errors such as a full disk are ignored."""
    assembly = Path(answer["assembly"])
    files = [(path.suffix, base64.b64encode(path.read_bytes()).decode()) for path in (binary, assembly)]
    with suppress(OSError):
        kept = json.dumps([{**answer, "assembly": assembly.suffix}, *files])
        open_cache(CacheKind.GPU_KERNELS).write_text(entry, kept)
