"""llmc as it is installed: with each extra alone, and without torch, every verb works or names what to install.

`make test-extras` runs this; it asks the package index for what llmc depends on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmc.cli.missing_package import EXTRAS as EXTRA_OF
from tests.cli.test_help import verbs
from tests.own_environment import environment, pip

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "models" / "bard-draft"
TEXT = ROOT / "LICENSE"
EXTRAS: Mapping[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
# Installed without its dependencies: what runs engines on a CPU needs no torch.
NO_TORCH = "no torch"
# What llmc is worked on with; no verb imports any of it.
FOR_WORK = {"docs", "dev"}
# ray brings all of serve.
BRINGS = {"ray": {"ray", "serve"}}
HAS_TORCH = "torch"

pytestmark = pytest.mark.extras


@dataclass(frozen=True)
class Use:
    """A command line, and what it needs beside llmc itself: extras, or torch. words: ENGINE and OUT are paths."""

    words: str
    needs: tuple[str, ...] = ()
    fails_with: str | None = None

    @property
    def verb(self) -> tuple[str, ...]:
        """One word, or two of a group."""
        words = tuple(self.words.split())
        return words[:2] if words[0] in ("bench", "cache") else words[:1]


SMALL = "--input-len 4 --output-len 4"
USES = (
    Use("targets"),
    Use("env"),
    Use("cache"),
    Use("cache clear"),
    Use("inspect ENGINE --launches --weights --quantization"),
    Use("run ENGINE -p hi --max-tokens 3"),
    Use("run ENGINE -p hi --max-tokens 3 --grammar choice:a|b", ("serve",)),
    Use("run MODEL -p hi --max-tokens 3", ("torch", "hf")),
    Use("chat ENGINE"),
    Use("report ENGINE -o OUT.html"),
    Use("profile ENGINE --prefill 8 --repeats 1"),
    Use(f"bench latency ENGINE {SMALL} --iterations 1 --warmup 0"),
    Use(f"bench throughput ENGINE {SMALL} --num-prompts 1"),
    Use("bench startup ENGINE --iterations 1", ("serve",)),
    # There is no server: it is asked for, and does not answer.
    Use("bench serve --base-url http://127.0.0.1:9", ("serve",), fails_with="no server answers"),
    Use("bench serve --base-url http://127.0.0.1:9 --plot OUT.png", ("serve", "plot"), fails_with="no server answers"),
    Use("serve ENGINE --port 99999", ("serve",), fails_with="0 to 65535"),
    Use("verify ENGINE --against MODEL --length 8 --sequences 1", ("torch", "hf")),
    Use("verify ENGINE --against MODEL --length 8 --perplexity TEXT", ("torch", "hf")),
    Use("explain ENGINE"),
    Use("explain MODEL", ("torch", "hf")),
    Use("passes", ("torch",)),
    Use("passes MODEL", ("torch", "hf")),
    Use("diff ENGINE ENGINE"),
    Use("diff MODEL --length 4 --passes fuse_rms_norm", ("torch", "hf")),
    # Nothing is wrong with the model, so that the search has nothing to find.
    Use("bisect MODEL --length 4 --tolerance 1 -o OUT.bisect", ("torch", "hf"), fails_with="nothing to find"),
    Use("viz ENGINE --format dot -o OUT.dot"),
    Use("viz ENGINE --format json -o OUT.json"),
    Use("viz MODEL --format mermaid -o OUT.mmd", ("torch", "hf")),
    Use("models llama", ("torch", "hf")),
    Use("build MODEL -o OUT.llmc", ("torch", "hf")),
    Use("build MODEL -o OUT.gpu.llmc --target h100", ("torch", "gpu", "hf")),
    Use("export MODEL --stage canonical -o OUT.onnx", ("torch", "hf", "onnx")),
    Use("tune ENGINE", ("torch",), fails_with="error: "),
)


def test_every_verb_is_used() -> None:
    used = {use.verb for use in USES}
    assert used == {verb for verb in verbs() if verb != ("bench",)}


def test_every_package_of_an_extra_is_known_by_what_brings_it() -> None:
    assert EXTRAS.keys() - FOR_WORK == {extra for extra in EXTRA_OF.values() if extra is not None}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llmc as it is published."""
    folder = tmp_path_factory.mktemp("wheel")
    pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with llmc and no extra."""
    python = environment(tmp_path_factory.mktemp("plain"))
    pip(python, "install", "-c", str(ROOT / "constraints.txt"), str(wheel))
    return python


@pytest.fixture(scope="module")
def installed(plain: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Python of an environment with llmc and one extra, or "" for none, or without torch.

    An extra's environment sees the plain one behind itself, which `pip install` would fill with the same packages.
    """
    made: dict[str, Path] = {"": plain}

    def install(name: str) -> Path:
        if name not in made:
            python = environment(tmp_path_factory.mktemp(name.replace(" ", "-")))
            if name == NO_TORCH:
                frozen = pip(plain, "freeze", "--exclude", "torch", "--exclude", "llmc-compiler").split("\n")
                pip(python, "install", "--no-deps", *filter(None, frozen), str(wheel))
            else:
                (site_packages(python) / "plain.pth").write_text(f"{site_packages(plain)}\n")
                pip(python, "install", "-c", str(ROOT / "constraints.txt"), f"{wheel}[{name}]")
            made[name] = python
        return made[name]

    return install


@pytest.mark.parametrize("use", USES, ids=lambda use: use.words)
@pytest.mark.parametrize("extra", ["", NO_TORCH, *(name for name in EXTRAS if name != "dev")])
def test_a_verb_works_or_names_what_to_install(
    extra: str, use: Use, installed: Callable[[str], Path], draft_engine: Path, tmp_path: Path
) -> None:
    python = installed(extra)
    paths = {"ENGINE": draft_engine, "MODEL": MODEL, "TEXT": TEXT}
    words = [str(paths.get(word, word)).replace("OUT", str(tmp_path / "out")) for word in use.words.split()]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("LLMC_", "PYTHON"))}
    if use.verb[0] == "cache":
        variables["LLMC_CACHE_DIR"] = str(tmp_path / "cache")  # Not the one whose kernels the others share.
    done = subprocess.run(
        [str(python), "-m", "llmc", *words],
        cwd=tmp_path,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    there = BRINGS.get(extra, {extra}) | ({HAS_TORCH} if extra != NO_TORCH else set())
    missing = [need for need in use.needs if need not in there]
    if missing:
        named = "pip install torch" if missing[0] == HAS_TORCH else f"llmc-compiler[{missing[0]}]"
        assert done.returncode == 2 and named in done.stderr, said
    elif use.fails_with is not None:
        assert done.returncode == 2 and use.fails_with in done.stderr and "pip install" not in done.stderr, said
    else:
        assert done.returncode == 0, said


def site_packages(python: Path) -> Path:
    return next((python.parent.parent / "lib").glob("python3*")) / "site-packages"
