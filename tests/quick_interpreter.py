"""Triton's interpreter without what it does again in every launch; its arithmetic is what it is.

Before a launch, and before each call of one kernel by another, it puts its own functions in the places of the
language's, and takes them away afterwards: half of a test's time. Here they stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def keep_language_patched() -> None:
    """Only in a process whose kernels are all interpreted."""
    import triton.language as tl
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
        interpreter._get_np_dtype = _cached_by_element(interpreter._get_np_dtype)


def _cached_by_element(numpy_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The types of blocks and of pointers cannot be hashed."""
    of_element = functools.cache(numpy_dtype)

    def found(kind: Any) -> Any:
        return numpy_dtype(kind.scalar) if kind.scalar.is_ptr() else of_element(kind.scalar)

    return found
