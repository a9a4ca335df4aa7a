"""How GPU kernels read weights, by the op that yields them: the table to which a new storage adds a row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch
from llmc.codegen.triton.kernels.products.coded_product import coded_product, coded_refusal
from llmc.codegen.triton.kernels.products.product import Epilogue, Product, dense_product, dense_refusal
from llmc.codegen.triton.kernels.products.sparse_product import (
    sparse_codes_product,
    sparse_codes_refusal,
    sparse_product,
    sparse_refusal,
)
from llmc.codegen.triton.kernels.rows.coded_embedding import code_lookup
from llmc.codegen.triton.kernels.rows.select_rows import table_lookup
from llmc.codegen.triton.kernels.rows.sparse_embedding import sparse_lookup
from llmc.graph.refusal import Refusal
from llmc.targets import GpuTarget

_llmc = torch.ops.llmc


@dataclass(frozen=True)
class Storage:
    """How kernels read a weight.

    product: what a node asks of them, from its call and what it does with the sums. lookup: the launch of an embedding.
    refusal: why there is no kernel for a product or lookup. arrivals: ops that may yield x; norms aside.
    """

    product: Callable[[Call, Epilogue], Product]
    lookup: Callable[[Call], DeviceLaunch]
    refusal: Callable[[fx.Node, GpuTarget], Refusal | None]
    arrivals: frozenset[Any] = frozenset()


# None: a dense weight, which no op computes.
STORAGES: Mapping[Any, Storage] = MappingProxyType(
    {
        None: Storage(dense_product, table_lookup, dense_refusal),
        _llmc.sparse_bitmask.default: Storage(sparse_product, sparse_lookup, sparse_refusal),
        _llmc.sparse_codes.default: Storage(
            sparse_codes_product, sparse_lookup, sparse_codes_refusal, frozenset({_llmc.round_tokens.default})
        ),
        _llmc.dequantize.default: Storage(
            coded_product, code_lookup, coded_refusal, frozenset({_llmc.round_tokens.default})
        ),
    }
)
