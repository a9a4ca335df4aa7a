"""Fixtures that all tests share: golden texts, torch held to one thread, and Triton's interpreter without a GPU."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llmc.cache.source_digest import source_digest
from llmc.settings import settings
from tests.cache_beside import cache_beside
from tests.quick_interpreter import keep_language_patched
from tests.slow_cases import mark_slow_cases

if TYPE_CHECKING:
    from tests.family_captures import FamilyCaptures
    from tests.kept_compiler import KeptCompiler

GOLDEN = Path(__file__).parent / "golden"
DRAFT = Path(__file__).parent.parent / "examples" / "models" / "bard-draft"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the expected texts in tests/golden")
    parser.addoption("--execution-table", help="write there how PTX as executed differs from Triton's interpreter")


def pytest_configure(config: pytest.Config) -> None:
    """Triton decides when a kernel is defined whether it is interpreted, so the whole test process does one or other.

    With `-m gpu` kernels run on the device; otherwise they are interpreted. Compiling happens in worker processes
    (llmc/codegen/triton/compile.py), where kernels are never interpreted.

    Graphs that were captured before by the same sources are found again: no test leaves transformers' classes patched.
    It is a third of the time of building what is tested.

    What is imported and collected stays: a fifth of that time would go into looking for garbage in it.
    """
    gc.disable()
    os.environ.setdefault("LLMC_CAPTURE_CACHE", "always")
    if config.getoption("markexpr") != "gpu":
        if "triton" in sys.modules:
            raise pytest.UsageError("a conftest.py imports Triton, before anything has said that it is interpreted")
        os.environ["TRITON_INTERPRET"] = "1"
    if config.getoption("dist", "no") != "no":
        return  # The process that hands tests to others runs none: they need not wait until it has imported torch.
    import llmc.ops  # noqa: F401  (registers the ops that graphs are made of)

    if find_spec("hypothesis"):  # Not where the tests of GPUs run.
        from hypothesis import HealthCheck
        from hypothesis import settings as examples

        # No test depends on how fast the machine is.
        examples.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        examples.load_profile("untimed")
    if config.getoption("markexpr") != "gpu":
        keep_language_patched()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` chooses among them."""
    mark_slow_cases(items)


def pytest_collection_finish() -> None:
    """Sources that are edited from now on are not those of what is captured.

    And what is imported by now stays: looking through torch's and transformers' objects again and again for garbage, as
    Python does whenever tests have made a few thousand of their own, is a tenth of the time that tests take."""
    from llmc.frontends.transformers.capture_cache import OWN_ROOMS  # Not above: it imports Triton.

    source_digest(OWN_ROOMS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_sessionfinish() -> None:
    """Now it may go: nanobind counts what is left at the end."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """A spinning OpenMP pool next to a busy process is ten times slower than one thread."""
    import torch  # Not above: it takes seconds, and not all processes need it.

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def compiler() -> Iterator[KeptCompiler]:
    """Wherever kernels are compiled in processes: each would import torch and Triton again, and nearly all kernels are
    found in the cache."""
    # Not above: it imports torch.
    from tests.kept_compiler import kept_compiler

    with kept_compiler() as kept, pytest.MonkeyPatch.context() as patch:
        for user in ("codegen.triton.compile", "codegen.triton.triton_kind", "tuning.ways", "tuning.variants"):
            patch.setattr(f"llmc.{user}.Workers", kept)
        yield kept


@pytest.fixture(scope="session")
def captured_family(tmp_path_factory: pytest.TempPathFactory) -> FamilyCaptures:
    """`captured_family(name)`: a tiny model of the family and its capture, made once."""
    # Not above: capturing imports Triton, and nothing has said yet that its kernels are interpreted.
    from tests.family_captures import family_captures

    return family_captures(tmp_path_factory)


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint_of(family, …)`: the directory of `tiny_model(family, …)`, written once. The capture of a directory is
    found again, that of a model in memory is not."""
    from tests.tiny_models import tiny_checkpoint  # Not above: it imports torch.

    return cache(lambda family, **overrides: tiny_checkpoint(family, tmp_path_factory.mktemp(family), **overrides))


@pytest.fixture(scope="session")
def draft_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped two-layer model for this machine's CPU, with sequences of 256 tokens."""
    # Not above: so does this.
    from llmc.compiler import build

    path = tmp_path_factory.mktemp("draft") / "draft.llmc"
    build(DRAFT, path, max_model_len=256)
    return path


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache without engines and their code for this process and those it starts; compiled kernels and captures are
    shared."""
    root = cache_beside(tmp_path / "cache")
    monkeypatch.setenv("LLMC_CACHE_DIR", str(root))
    settings.cache_clear()
    yield root
    settings.cache_clear()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: text equals tests/golden/{name}; with --update-golden the file is rewritten instead."""
    update: bool = request.config.getoption("--update-golden")

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run pytest with --update-golden and read the diff"
        assert text == path.read_text(encoding="utf-8")

    return check
