"""Attention of prompts by warps that copy and warps that multiply, as compiled for an H100 and executed on the CPU.

What no request may read of the caches is NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from llmc.codegen.triton.kernel import DeviceLaunch
from llmc.codegen.triton.kernels.attention.paged_attention import paged_attention
from llmc.codegen.triton.kernels.attention.specialized_prefill import specialized_prefill_kernel
from llmc.ptx.errors import PtxError
from llmc.ptx.finding import Check
from llmc.runtime.speculation.draft import Draft
from tests.codegen.cpp.paged_batch import PagedBatch, paged_batch
from tests.codegen.cpp.tree_batch import with_trees
from tests.codegen.triton.ptx_device import PtxDevice
from tests.codegen.triton.tensor_call import TensorCall, relative_error
from tests.kept_compiler import KeptCompiler
from tests.tolerances import GPU_KERNELS

# (context, queries): a prompt, a later chunk, whole blocks, no tokens, a decode, one query more than a tile has.
REQUESTS = [(40, 40), (300, 109), (64, 32), (90, 0), (77, 1), (33, 33)]


@pytest.fixture
def h100(compiler: KeptCompiler) -> PtxDevice:
    return PtxDevice.of("h100", compiler.workers)


@pytest.fixture(params=["h100", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, compiler: KeptCompiler) -> str:
    """Where the compiled kernel runs: in the machine for PTX, or on a device."""
    if request.param == "h100":
        return PtxDevice.of("h100", compiler.workers)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is for sm_90")
    triton.set_allocator(lambda nbytes, alignment, stream: torch.empty(nbytes, dtype=torch.int8, device="cuda"))
    return "cuda"


def attend(batch: PagedBatch, place: str, *, alternates: bool = True) -> Tensor:
    """The attention of requests with several tokens."""
    call = _call(batch, place)
    ways = [x for x in _specialized(call) if x.constants["ALTERNATE"] is alternates]
    call.run(ways[0])
    return call.results[0].cpu()


def _call(batch: PagedBatch, device: str) -> TensorCall:
    indices = batch.query_starts, batch.context_lens, batch.block_tables
    options = batch.window, batch.softcap, batch.sinks, None, None, batch.tree_masks
    arguments = batch.q, batch.k_cache, batch.v_cache, *indices, batch.scale, *options
    return TensorCall(paged_attention, arguments, [torch.empty_like(batch.expected())], device, in_place=False)


def _specialized(call: TensorCall, target: str = "h100") -> list[DeviceLaunch]:
    return [launch for launch in call.candidates(target) if launch.function is specialized_prefill_kernel]


def _of_several(batch: PagedBatch, rows: Tensor) -> Tensor:
    """The rows of requests with two tokens or more."""
    counts = batch.query_starts.diff()
    return rows[torch.repeat_interleave(counts > 1, counts.long())]


def _check(batch: PagedBatch, actual: Tensor) -> None:
    error = relative_error(_of_several(batch, actual), _of_several(batch, batch.expected()))
    assert error <= GPU_KERNELS[batch.q.dtype]


SHAPES: list[dict[str, Any]] = [
    {"head_dim": 128, "heads": 4, "kv_heads": 1, "dtype": torch.bfloat16},
    {"head_dim": 64, "heads": 6, "kv_heads": 2, "window": 37, "sinks": True, "dtype": torch.bfloat16},
    {"head_dim": 256, "heads": 2, "kv_heads": 1, "window": 90, "softcap": 2.0, "dtype": torch.float16},
    {"head_dim": 64, "value_dim": 128, "heads": 2, "kv_heads": 2, "block_size": 128, "dtype": torch.float16},
    {"head_dim": 128, "heads": 5, "kv_heads": 1, "block_size": 8, "softcap": 2.0, "dtype": torch.float16},
    {"head_dim": 64, "heads": 2, "kv_heads": 2, "window": 1, "block_size": 64, "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("shape", [*SHAPES[:2], *(pytest.param(x, marks=pytest.mark.slow) for x in SHAPES[2:])])
def test_rows_are_the_references(shape: dict[str, Any], place: str) -> None:
    batch = paged_batch(REQUESTS, **shape)
    _check(batch, attend(batch, place))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_groups_that_take_no_turns_compute_the_same_bits(shape: dict[str, Any], place: str) -> None:
    batch = paged_batch(REQUESTS, **shape)
    rows = (_of_several(batch, attend(batch, place, alternates=way)) for way in (True, False))
    assert torch.equal(*rows)


def test_a_row_has_the_same_bits_however_its_prompt_is_divided(place: str) -> None:
    batch = paged_batch([(290, 290)], head_dim=64, heads=2, kv_heads=2, dtype=torch.bfloat16, window=150)
    whole = attend(batch, place)
    for first, last in ((0, 130), (130, 290)):
        assert torch.equal(attend(batch.part(0, first, last), place), whole[first:last])


@pytest.mark.slow
def test_requests_with_trees_are_left_out(h100: PtxDevice) -> None:
    tree = Draft(tokens=[7, 46, 21, 39, 69], parents=[None, 0, 1, 2, None])
    trees = {0: tree}
    batch = paged_batch([(90, len(tree) + 1), (70, 30), (20, 1)], head_dim=64, dtype=torch.bfloat16)
    batch = with_trees(batch, trees)
    rows = attend(batch, h100)
    counts, starts = batch.query_starts.diff().tolist(), batch.query_starts.tolist()
    for request, (count, start) in enumerate(zip(counts, starts, strict=False)):
        own = rows[start : start + count]
        assert bool(own.isnan().all()) is (request in trees or count < 2)


# What is taken out of the PTX, and how often: the first fence is for the barriers, the second one for the queries.
FAULTS = [
    (r"fence\.proxy\.async\.shared::cta;", 2, Check.PROXY),
    (r"wgmma\.wait_group\.sync\.aligned 0;", 1, Check.REGISTERS),
    (
        r"mbarrier\.try_wait\.parity\.shared::cta\.b64 complete, [^;]*;\s*@!complete bra\.uni waitLoop;",
        1,
        Check.UNWRITTEN,
    ),
]


@pytest.mark.parametrize(("pattern", "times", "check"), FAULTS)
def test_a_missing_wait_or_fence_is_found(pattern: str, times: int, check: Check, h100: PtxDevice) -> None:
    assert check.value in _fault(h100, pattern, times)


def test_a_tile_that_no_group_gives_back_ends_the_launch(h100: PtxDevice) -> None:
    """The producer waits for it forever."""
    batch = paged_batch([(600, 20)], head_dim=64, heads=2, kv_heads=2, dtype=torch.bfloat16)
    gives_back = r"@%p\d+ mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];"
    with pytest.raises(PtxError, match="waits forever"):
        _edited(batch, h100, [(gives_back, "")])


def _fault(h100: PtxDevice, pattern: str, times: int) -> str:
    batch = paged_batch([(200, 20)], head_dim=64, heads=2, kv_heads=2, dtype=torch.bfloat16)
    with pytest.raises(AssertionError) as raised:
        _edited(batch, h100, [(pattern, "")] * times)
    return str(raised.value)


def _edited(batch: PagedBatch, h100: PtxDevice, edits: list[tuple[str, str]]) -> None:
    call = _call(batch, h100)
    call.run(_specialized(call)[0], edits)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("a100", {}),
        ("b200", {}),
        ("h100", {"dtype": torch.float32}),
        ("h100", {"head_dim": 96}),
        ("h100", {"head_dim": 256, "block_size": 64}),
        ("h100", {"chunk": 30}),
        ("h100", {"slopes": True}),
        ("h100", {"window": 50, "pinned": 7}),
        ("h100", {"kv_heads": 1, "value_dim": 64, "latent": True}),
    ],
)
def test_other_attention_is_left_to_the_general_kernel(target: str, options: dict[str, Any]) -> None:
    shape: dict[str, Any] = {"head_dim": 64, "dtype": torch.float16} | options
    batch = paged_batch(REQUESTS, **shape)
    indices = batch.query_starts, batch.context_lens, batch.block_tables
    scoring = batch.window, batch.softcap, batch.sinks, None, None, batch.tree_masks, batch.slopes, batch.chunk
    arguments = batch.q, batch.k_cache, batch.v_cache, *indices, batch.scale, *scoring, batch.latent
    more = (None, None, batch.pinned)
    call = TensorCall(paged_attention, (*arguments, *more), [batch.expected()], "cpu", in_place=False)
    assert not _specialized(call, target)
    assert call.candidates(target)


def test_an_h100s_prompts_are_attended_to_by_it_first() -> None:
    call = _call(paged_batch(REQUESTS, head_dim=128, dtype=torch.float16), "cpu")
    assert call.candidates("h100")[0] == _specialized(call)[0]
    assert call.candidates("h200")[0].constants["ALTERNATE"]
