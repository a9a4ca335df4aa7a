"""Passes that do not come with llmc: where they go in the order, and how they are found by name or by entry point."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from llmc.errors import LlmcError, OptionError, did_you_mean
from llmc.passes.rewrite import Pass

ENTRY_POINT_GROUP = "llmc.passes"


def place(passes: Iterable[Pass], added: Sequence[Pass]) -> tuple[Pass, ...]:
    """The passes with `added` put in: each after the pass that its `after` names, or at the end.

    Several after the same pass keep their order. Raises OptionError for an object that is not a pass, for a name that
    is taken, and for an `after` that names no pass.
    """
    order = list(passes)
    placed: dict[str, str] = {}
    for pass_ in added:
        _check_type(pass_, f"{pass_!r:.80}", "see docs/custom-passes.md")
        names = [p.name for p in order]
        if pass_.name in names:
            raise OptionError(
                f"there is a pass {pass_.name!r} already", at=f"name={pass_.name!r}", fix="give it a unique name"
            )
        order.insert(_index(pass_, order, names, placed), pass_)
        if pass_.after is not None:
            placed[pass_.name] = pass_.after
    return tuple(order)


def _index(graph_pass: Pass, order: list[Pass], names: list[str], placed: dict[str, str]) -> int:
    if graph_pass.after is None:
        return len(order)
    if graph_pass.after not in names:
        raise OptionError(
            f"pass {graph_pass.name!r} goes after {graph_pass.after!r}, which does not exist",
            at=f"after={graph_pass.after!r}",
            fix=f"{did_you_mean(graph_pass.after, names)}passes: {', '.join(names)}",
        )
    index = names.index(graph_pass.after) + 1
    while index < len(order) and placed.get(order[index].name) == graph_pass.after:
        index += 1
    return index


def installed() -> tuple[Pass, ...]:
    """The passes of installed packages: whatever their entry points of the group `llmc.passes` name, by name."""
    passes: list[Pass] = []
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: p.name):
        at = f"entry point {point.name} = {point.value}"
        fix = f"repair or uninstall the package {point.dist.name if point.dist else ''}".rstrip()
        passes += _as_passes(_guarded(point.load, at, fix), at)
    return tuple(passes)


def load_passes(reference: str) -> tuple[Pass, ...]:
    """The passes that `module:attribute` or `path/to/file.py:attribute` names.

    The attribute is a Rewrite or a GraphPass, or a list or tuple of them. The working directory is searched for the
    module as well. Raises OptionError.
    """
    module_name, colon, attribute = reference.rpartition(":")
    if not colon or not module_name or not attribute.isidentifier():
        raise OptionError(
            f"{reference!r} does not name passes",
            at=f"--passes-from {reference}",
            fix="write module:attribute or path/to/file.py:attribute",
        )
    at = f"--passes-from {reference}"
    module = _module(module_name, at)
    if not hasattr(module, attribute):
        known = [name for name, value in vars(module).items() if isinstance(value, Pass)]
        hint = f"passes in it: {', '.join(known)}" if known else "it defines no passes"
        raise OptionError(f"{module_name} has no {attribute!r}", at=at, fix=hint)
    return _as_passes(getattr(module, attribute), at)


def _module(name: str, at: str) -> ModuleType:
    if name.endswith(".py"):
        return _module_of_file(Path(name), at)
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    fix = "name a module that can be imported, or a .py file"
    module: ModuleType = _guarded(lambda: importlib.import_module(name), at, fix)
    return module


def _module_of_file(path: Path, at: str) -> ModuleType:
    if not path.is_file():
        raise OptionError(f"there is no file {path}", at=at, fix="name a Python file that defines passes")
    name = f"llmc_passes_of_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path} is not a Python file", at=at, fix="name a Python file that defines passes")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[name] = module  # Dataclasses and docstrings are looked up there by module name.
    _guarded(lambda: loader.exec_module(module), at, "the file must run by itself: python -c 'import …'")
    return module


def _guarded(load: Callable[[], Any], at: str, fix: str) -> Any:
    try:
        return load()
    except LlmcError:
        raise
    except Exception as error:  # The code is the user's, which may raise anything.
        raise OptionError(f"the passes cannot be loaded: {type(error).__name__}: {error}", at=at, fix=fix) from error


def _as_passes(value: Any, at: str) -> tuple[Pass, ...]:
    passes = tuple(value) if isinstance(value, list | tuple) else (value,)
    for pass_ in passes:
        _check_type(pass_, at, "name a pass, or a list of passes")
    return passes


def _check_type(value: object, at: str, fix: str) -> None:
    if not isinstance(value, Pass):
        kind = type(value).__name__
        raise OptionError(f"a pass must be a Rewrite or a GraphPass, not {value!r:.80} ({kind})", at=at, fix=fix)
