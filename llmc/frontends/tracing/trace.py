"""torch.export of a module with a symbolic token count, to a functional program in aten."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from llmc.errors import CaptureError, LlmcError
from llmc.frontends.tracing.functionalize import functionalize
from llmc.frontends.tracing.trace_errors import explain, model_line

# The length of the example: not 1, which export would take for a constant, and unlike any usual model dimension.
EXAMPLE_TOKENS = 7


def trace(module: nn.Module, *, with_positions: bool, hidden: int | None = None) -> ExportedProgram:
    """Export forward(input_ids [, positions [, hidden]]) -> logits, all of one batch row and T tokens, without in-place
    ops. hidden: columns of a hidden state of each token, fp32, for a module that takes such.

    Raises CaptureError that names the module's own line where it could not be traced.
    """
    ids = torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.int64)
    positions = torch.arange(EXAMPLE_TOKENS, dtype=torch.int64).unsqueeze(0)
    example: tuple[Tensor, ...] = (ids, positions) if with_positions else (ids,)
    if hidden is not None:
        example = (*example, torch.zeros(1, EXAMPLE_TOKENS, hidden))
    # T may be bounded by the model's own tables and checks, which one name of the dims would forbid; _same_tokens ties.
    dynamic: tuple[Any, ...] = ({1: Dim.DYNAMIC},) * len(example)
    from torch._dynamo import config  # seconds to import; export does it too, when it is called

    # Making an entry of the fake tensors' own cache takes as long as the op itself, and few are used again.
    tied = module.register_forward_pre_hook(_same_tokens)
    with tied, explained(), config.patch(fake_tensor_cache_enabled=False):
        program = export(module, example, dynamic_shapes=dynamic, strict=False)
        _check_short_steps(program)
        return functionalize(program)


def _same_tokens(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    for other in inputs[1:]:
        torch._check(other.shape[1] == inputs[0].shape[1])


def _check_short_steps(program: ExportedProgram) -> None:
    """A step may have one token: code that was traced for many must not ask how many there are."""
    lower = [bounds.lower for bounds in program.range_constraints.values()]
    # Sizes that depend on tensor values have no bounds, or infinite ones.
    least = max((int(bound) for bound in lower if bound.is_Integer), default=0)
    if least > 2:
        raise CaptureError(
            f"the model's code takes another branch for fewer than {least} tokens; it is traced with {EXAMPLE_TOKENS}",
            fix="compute the same for any number of tokens: a step of an engine has one token or many",
        )


@contextmanager
def explained() -> Iterator[None]:
    """Run torch.export quietly and without gradients, and raise what it raises as a CaptureError."""
    try:
        with torch.no_grad(), _quiet():
            yield
    except LlmcError as error:
        if error.at is not None:
            raise
        # The place in a hook, which knows its arguments but not its caller.
        raise type(error)(error.problem, at=model_line(error), fix=error.fix) from error
    except Exception as error:  # Tracing runs the user's code, which can raise anything; all of it is translated.
        raise explain(error) from error


@contextmanager
def explained_at_once() -> Iterator[None]:
    """Explain control flow that depends on tensor values immediately; torch.export would print its partial graph."""
    try:
        yield
    except RuntimeError as error:
        if "data-dependent" not in str(error):
            raise
        raise explain(error) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's log of errors that are raised and explained anyway, and its own deprecation warnings."""
    names = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
