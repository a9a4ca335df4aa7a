"""An engine is whole or absent, and the same inputs give the same bytes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import llmc
from llmc.errors import EngineFormatError
from tests.cache_beside import cache_beside
from tests.tiny_models import tiny_checkpoint

MODEL = Path(__file__).parent.parent.parent / "examples" / "models" / "bard-draft"


def digests(engine: Path) -> dict[str, str]:
    """SHA-256 of every file, by relative path."""
    files = sorted(path for path in engine.rglob("*") if path.is_file())
    return {str(path.relative_to(engine)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", "reference", "onnxruntime"])
def test_same_inputs_give_the_same_bytes(target: str, tmp_path: Path) -> None:
    # Its code is compiled again, too.
    beside = {**os.environ, "LLMC_CACHE_DIR": str(cache_beside(tmp_path / "other-cache"))}
    llmc.build(MODEL, tmp_path / "first" / "a.llmc", target=target)
    # From another process too: nothing may hang on hash seeds, addresses or the order of a set.
    # One tensor rank that is asked for is no other engine than none.
    options = ["--target", target, "--tensor-parallel-size", "1"]
    command = [sys.executable, "-m", "llmc", "build", str(MODEL), "-o", str(tmp_path / "b.llmc"), *options]
    subprocess.run(command, check=True, capture_output=True, env=beside)
    first, second = digests(tmp_path / "first" / "a.llmc"), digests(tmp_path / "b.llmc")
    assert first == second


def test_an_engine_rebuilt_while_the_old_one_is_open(tmp_path: Path) -> None:
    """The dynamic loader knows libraries by their paths; the new engine must not run the old one's code."""
    path = tmp_path / "engine.llmc"
    tokens = [5, 9, 2, 7]
    small = tiny_checkpoint("llama", tmp_path / "small", num_hidden_layers=1)
    large = tiny_checkpoint("llama", tmp_path / "large")
    with llmc.compile(small, output=path) as old:
        before = old.logits(tokens)
        with llmc.compile(large, output=path) as new:
            assert new.info.parameters > old.info.parameters
            renewed = new.logits(tokens)
        assert (old.logits(tokens) == before).all()
    with llmc.compile(large, output=tmp_path / "elsewhere.llmc") as alone:
        assert (alone.logits(tokens) == renewed).all()


# Files that appear in the unfinished engine, in this order.
MOMENTS = ("report/graphs/00-captured.txt", "kernels/engine.cpp", "weights/*.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_build_killed_at_any_moment_leaves_no_engine(moment: str, tmp_path: Path) -> None:
    output = tmp_path / "engine.llmc"
    command = [sys.executable, "-m", "llmc", "build", str(MODEL), "-o", str(output)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not any(tmp_path.glob(f"*/{moment}")):
        time.sleep(0.001)
    process.kill()
    process.wait()
    left = list(tmp_path.iterdir())
    assert left, "the build was to be killed while it wrote"
    for path in left:
        if path == output:
            llmc.load(path).close()  # the build had finished: then it is whole
        else:
            with pytest.raises(EngineFormatError):
                llmc.load(path)
