"""Models that are objects in memory as front ends: transformers models, torch modules, exported programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.frontends.front_end import FrontEnd, OpenedModel

if TYPE_CHECKING:
    import torch

    from llmc.frontends.captured import Captured
    from llmc.frontends.checkpoints.memory_source import MemorySource
    from llmc.options import BuildOptions


def _is_program(model: object) -> bool:
    from torch.export import ExportedProgram

    return isinstance(model, ExportedProgram)


def _is_module(model: object) -> bool:
    from torch import nn

    return isinstance(model, nn.Module)


def _is_pretrained(model: object) -> bool:
    """Whether it is a transformers model, without importing transformers for one that is not."""
    if not any(base.__module__.startswith("transformers.") for base in type(model).__mro__):
        return False
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def _parameter_dtype(opened: OpenedModel[MemorySource]) -> torch.dtype | None:
    return next((p.dtype for p in opened.given.parameters() if p.is_floating_point()), None)


def _parameters(opened: OpenedModel[MemorySource]) -> MemorySource:
    from llmc.frontends.checkpoints.memory_source import MemorySource

    return MemorySource(dict(opened.given.named_parameters()))


def _capture_pretrained(opened: OpenedModel[MemorySource], options: BuildOptions, may_lack_weights: bool) -> Captured:
    from llmc.frontends.transformers.capture import capture_pretrained

    return capture_pretrained(opened.given, options)


def _capture_module(opened: OpenedModel[MemorySource], options: BuildOptions, may_lack_weights: bool) -> Captured:
    from llmc.frontends.modules.module import capture_module

    return capture_module(opened.given, opened.weights, options)


def _state(opened: OpenedModel[MemorySource]) -> MemorySource:
    from llmc.frontends.checkpoints.memory_source import MemorySource

    return MemorySource(opened.given.state_dict)


def _capture_program(opened: OpenedModel[MemorySource], options: BuildOptions, may_lack_weights: bool) -> Captured:
    from llmc.frontends.modules.exported_program import capture_program

    return capture_program(opened.given, opened.weights, options)


PRETRAINED = FrontEnd(
    "transformers model",
    recognises=_is_pretrained,
    dtype=_parameter_dtype,
    weights=_parameters,
    capture=_capture_pretrained,
    directory=lambda model: None,
)
MODULE = FrontEnd(
    "torch module",
    recognises=_is_module,
    dtype=_parameter_dtype,
    weights=_parameters,
    capture=_capture_module,
    directory=lambda model: None,
)
# Its casts are a part of it, so it is built in whatever dtype it was exported.
PROGRAM = FrontEnd(
    "exported program",
    recognises=_is_program,
    dtype=lambda opened: None,
    weights=_state,
    capture=_capture_program,
    directory=lambda model: None,
)
