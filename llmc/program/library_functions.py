"""Every function of a library that a launch may name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from llmc.program import library_collectives, library_products

# Parameters that a function only reads; it may write through the other pointers.
READ_ONLY = ("x_ptr", "weight_ptr", "ranks_ptr")
FUNCTIONS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {**library_products.FUNCTIONS, **library_collectives.FUNCTIONS}
)
