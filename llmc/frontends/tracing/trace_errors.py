"""Errors of a failed torch.export: the line of the model's code, the reason, and the change to make."""

import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import sympy
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode, ShapeEnv

from llmc.errors import CaptureError

_OWN = str(Path(__file__).parents[2])
# With sympy, in which torch counts sizes. Installed packages, transformers among them, lie below the standard library.
_NOT_THE_MODEL = tuple(
    map(str, (Path(torch.__file__).parent, Path(sympy.__file__).parent, Path(re.__file__).parents[1]))
)

_TRANSFORMERS = "/transformers/"

# Advice if the line is not in the user's own code.
OTHER_MODELS = (
    "choose another architecture (`llmc models` says which compile), or give a module of your own that does this for "
    "all tokens, with masks and torch.where in the place of sizes and branches"
)

# Words in a line that loops over tokens, for which llmc has its own ops. Hidden states do not count as states.
_SCAN = re.compile(r"scan|(?<!hidden_)state|chunk|recurren|delta")
_OTHER_STATES = (
    "nothing helps but another model: llmc has no op for these states, which go from token to token (docs/states.md "
    "says which it has, `llmc models` which architectures compile)"
)


def explain(error: Exception) -> CaptureError:
    """The error to raise in place of one from torch.export."""
    at = model_line(error)
    message = _first_line(error)
    is_of_transformers = at is not None and at.startswith(_TRANSFORMERS.lstrip("/"))
    theirs = OTHER_MODELS if is_of_transformers else None
    if isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException):
        problem = "the model's control flow or a size depends on tensor values, which a compiled graph cannot follow"
        fix = theirs or "replace `if tensor`, .item() and .tolist() there by tensor operations such as torch.where"
    elif isinstance(error, DynamicOutputShapeException):
        problem = f"the size of a result depends on tensor values: {message}"
        fix = theirs or "replace nonzero, boolean indexing and unique there by masks and torch.where"
    elif is_of_transformers:
        problem = f"this transformers model could not be traced: {type(error).__name__}: {message}"
        fix = "the architecture or this configuration of it is not supported; other versions of transformers may be"
    elif isinstance(error, ConstraintViolationError) or "onstraints violated" in str(error):
        problem = "the model's code fixes the number of tokens to the length it is traced with"
        fix = "derive sizes from input.shape there, and do not compare or store them as Python numbers"
        at = at or _specialized_line(error)
        if at is not None and at.startswith(_TRANSFORMERS.lstrip("/")):
            fix = _OTHER_STATES if goes_from_token_to_token(at) else OTHER_MODELS
    elif isinstance(error, NotImplementedError):
        problem = f"the model uses an operation that cannot be traced: {message}"
        fix = "replace it by torch operations, or register a fake implementation with torch.library"
    else:
        problem = f"the model could not be traced: {type(error).__name__}: {message}"
        fix = "forward must take only token ids [1, tokens], on the CPU, at any length, and use torch operations"
    return CaptureError(problem, at=at, fix=fix)


def goes_from_token_to_token(place: str | None) -> bool:
    """Whether the code of a line, as in "FILE:NUMBER: CODE", looks like that of a recurrence."""
    return place is not None and _SCAN.search(place.partition(": ")[2]) is not None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


def model_line(error: BaseException) -> str | None:
    """The deepest line of the error's traceback that is neither torch's, the standard library's nor llmc's."""
    lines = (_last_of_the_model(traceback.extract_tb(seen.__traceback__)) for seen in _chain(error))
    return next((line for line in lines if line is not None), None)


def _specialized_line(error: BaseException) -> str | None:
    """The line that fixed a size. Export notices after tracing, when only the shape environment still knows it."""
    for seen in _chain(error):
        for frame, _ in traceback.walk_tb(seen.__traceback__):
            shape_env = frame.f_locals.get("self")
            if isinstance(shape_env, ShapeEnv):
                places = (sloc.framework_loc for sloc in shape_env.replacements_slocs.values())
                return _last_of_the_model(place for place in places if isinstance(place, traceback.FrameSummary))
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _last_of_the_model(frames: Iterable[traceback.FrameSummary]) -> str | None:
    for frame in reversed(list(frames)):
        is_of_others = frame.filename.startswith(_NOT_THE_MODEL) and _TRANSFORMERS not in frame.filename
        if not is_of_others and not frame.filename.startswith((_OWN, "<")):
            _, package, inside = frame.filename.rpartition(_TRANSFORMERS)  # Wherever that is installed.
            return f"{package.lstrip('/')}{inside}:{frame.lineno}: {frame.line}"
    return None
