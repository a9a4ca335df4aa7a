"""How an llmc:: op is declared: a schema, an eager reference, a fake (shape) kernel and a cost.

Registering with torch.library is the one side effect on import that this package has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_LIBRARY = torch.library.Library("llmc", "DEF")


@dataclass(frozen=True)
class Op:
    """One llmc:: op. `overload` is what graphs call; `reference` is the eager oracle of every kernel."""

    name: str
    overload: torch._ops.OpOverload
    reference: Callable[..., Any]


OPS: dict[str, Op] = {}


def op(schema: str, *, fake: Callable[..., Any]) -> Callable[[F], F]:
    """Register the decorated eager reference as `llmc::<schema>`.

    fake: takes the same arguments as the op and returns empty tensors of the result's shape and dtype.
    """

    def register(reference: F) -> F:
        name = schema.split("(", 1)[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"llmc::{name}", fake, lib=_LIBRARY)
        overload = getattr(torch.ops.llmc, name).default
        OPS[name] = Op(name, overload, reference)
        return reference

    return register
