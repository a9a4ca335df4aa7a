"""Every function of a library that a launch may name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from llmc.program import library_collectives, library_products

FUNCTIONS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {**library_products.FUNCTIONS, **library_collectives.FUNCTIONS}
)
