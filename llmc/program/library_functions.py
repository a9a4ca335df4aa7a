"""Every function of a library that a launch may name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from llmc.program import library_collectives, library_products

# The parameters of which a function only reads; it may write what the other pointers lead to.
READ_ONLY = ("x_ptr", "weight_ptr", "ranks_ptr")
FUNCTIONS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {**library_products.FUNCTIONS, **library_collectives.FUNCTIONS}
)
