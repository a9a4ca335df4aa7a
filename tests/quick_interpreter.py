"""Triton's interpreter without what it does again in every launch and for every value; its arithmetic is what it is.

Before a launch, and before each call of one kernel by another, it puts its own functions in the places of the
language's, and takes them away afterwards: here they stay. The types of blocks, and the shapes of values, are made once
for each shape instead of some hundred times a program. Two values of one type, or a value and a number of its kind, are
not asked what both are to become, and the smaller of them is not copied to the size of the larger: numpy does without.
And what finds overflow in whole numbers is left out: three times the work of the sum, of which nothing is said.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np


def keep_language_patched() -> None:
    """Only in a process whose kernels are all interpreted."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    builder = interpreter.interpreter_builder
    if builder.options.sanitize_overflow and not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter.interpreter_semantic = _quick_semantic(tl)(builder)
    interpreter._patch_attr = _patch_with_few_calls
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    tl.core._unwrap_if_constexpr = _unwrapped_values_first(tl)
    interpreter._get_np_dtype = _cached_by_element(interpreter._get_np_dtype)
    _make_shapes_once(tl)


def _unwrapped_values_first(tl: Any) -> Callable[[Any], Any]:
    """Most of what is asked whether it is a constant, or holds such, is a value or a constant."""
    unwrap = tl.core._unwrap_if_constexpr

    def unwrapped(given: Any) -> Any:
        kind = type(given)
        if kind is tl.tensor:
            return given
        return given.value if kind is tl.constexpr else unwrap(given)

    return unwrapped


def _cached_by_element(numpy_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The types of blocks and of pointers cannot be hashed."""
    of_element = functools.cache(numpy_dtype)

    def found(kind: Any) -> Any:
        return numpy_dtype(kind.scalar) if kind.scalar.is_ptr() else of_element(kind.scalar)

    return found


def _patch_with_few_calls(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's own, but without its filter of keywords and the language's check that it was used."""
    from triton.runtime.interpreter import interpreter_semantic

    function = getattr(member, "__wrapped__", member)

    def call(*args: Any, **keywords: Any) -> Any:
        keywords["_semantic"] = interpreter_semantic
        return function(*args, **keywords)

    scope.set_attr(place, name, call)


def _quick_semantic(tl: Any) -> type[Any]:
    """The language's rules, after a look whether there is anything to do."""
    from triton.language.semantic import TritonSemantic

    whole = {id(kind) for kind in (tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint32, tl.uint64)}
    # Of two values that are both of one of these, the sum and the quotient are so too.
    plain = whole | {id(tl.int1), id(tl.float32)}
    numbers: dict[int, Any] = {id(tl.int32): int, id(tl.int64): int, id(tl.float32): float}

    class QuickSemantic(TritonSemantic):  # type: ignore[misc]
        def cast(self, input: Any, dst_ty: Any, *rounding: Any, **keywords: Any) -> Any:
            if input.dtype is dst_ty.scalar:
                return input
            return super().cast(input, dst_ty, *rounding, **keywords)

        def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
            if lhs.shape is rhs.shape:
                return lhs, rhs
            return super().broadcast_impl_value(lhs, rhs)

        def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *rules: Any, **more_rules: Any) -> Any:
            if type(lhs) is tl.tensor:
                kind = id(lhs.dtype)
                if type(rhs) is not tl.tensor:
                    if type(rhs) is numbers.get(kind) and (type(rhs) is int or rhs) and abs(rhs) < 1 << 31:
                        return self._alike(lhs, self._number(rhs, lhs.dtype))
                else:
                    is_offset = id(rhs.dtype) in whole and rules[:1] == (True,) and lhs.dtype.is_ptr()
                    if is_offset or (lhs.dtype is rhs.dtype and kind in plain):
                        return self._alike(lhs, rhs)
            return super().binary_op_type_checking_impl(lhs, rhs, *rules, **more_rules)

        @functools.cache  # noqa: B019  (there is one for the process)
        def _number(self, value: int | float, kind: Any) -> Any:
            return self.scalar_constant(value, dtype=kind)

        def _alike(self, lhs: Any, rhs: Any) -> Any:
            """Both of the shape that they have together, as an operation on each pair of elements takes them."""
            if lhs.shape is rhs.shape:
                return lhs, rhs
            own, others = (operand.type.__dict__.get("sizes", ()) for operand in (lhs, rhs))
            sizes = _shape_of_both(own, others)
            return (
                lhs if own == sizes else tl.tensor(lhs.handle, tl.block_type(lhs.dtype, list(sizes))),
                rhs if others == sizes else tl.tensor(rhs.handle, tl.block_type(rhs.dtype, list(sizes))),
            )

    return QuickSemantic


@functools.cache
def _shape_of_both(sizes: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """Raises ValueError if they have none, as the language does."""
    return np.broadcast_shapes(sizes, others)


def _make_shapes_once(tl: Any) -> None:
    """What a block's type and a value say of their shape is the same object for all of that shape."""
    make_type, make_value = tl.block_type.__init__, tl.tensor.__init__
    of_types: dict[tuple[Any, ...], dict[str, Any]] = {}
    of_values: dict[tuple[Any, ...], dict[str, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if sizes not in of_types:
            make_type(self, element_ty, shape)
            of_types[sizes] = {key: self.__dict__[key] for key in self.__dict__.keys() - {"element_ty", "name"}}
            of_types[sizes]["sizes"] = sizes
        self.__dict__.update(of_types[sizes], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = type.__dict__.get("sizes", ())
        if sizes not in of_values:
            make_value(self, handle, type)
            of_values[sizes] = {key: self.__dict__[key] for key in self.__dict__.keys() - {"handle", "type", "dtype"}}
        self.__dict__.update(of_values[sizes], handle=handle, type=type, dtype=type.scalar)

    name = functools.cached_property(lambda self: f"<{self.shape}, {self.element_ty}>")
    name.__set_name__(tl.block_type, "name")
    tl.block_type.name, tl.block_type.__init__, tl.tensor.__init__ = name, block_type, tensor
