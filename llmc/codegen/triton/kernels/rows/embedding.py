"""llmc::embedding: y[t] = weight[ids[t]], by how the table is stored: dense (select_rows.py), in codes
(coded_embedding.py), without its zeros (sparse_embedding.py).

Memory-bound: only the rows that are looked up move.
"""

import torch
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.storage import storage_for, storage_of
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.refusals import FLOATS, IDS, refuse_ranks
from llmc.codegen.triton.storages import STORAGES
from llmc.graph.refusal import Refusal
from llmc.targets import GpuTarget


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """Refuse more than one id per token, other dtypes of the result, and what the table's storage refuses."""
    storage = storage_for(STORAGES, node, target.name)
    if isinstance(storage, Refusal):
        return storage
    dtype = node.meta["val"].dtype
    if dtype not in (*FLOATS, *IDS):
        return Refusal(f"the result is {dtype}; GPU kernels know float16, bfloat16, float32 and ids", node)
    return refuse_ranks(node, ids=(1,)) or storage.refusal(node, target)


def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
    return (storage_of(STORAGES, call).lookup(call),)


embedding = KernelTemplate(torch.ops.llmc.embedding.default, supports, candidates)
