"""llmc::lora on GPUs: each token's row at its own adapter's ranks, the same bits in any company; and the products that
take it up."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from llmc.codegen.triton.kernels.products.linear import fused_linear, gated_linear, linear
from llmc.codegen.triton.kernels.products.lora import lora
from llmc.ops.lora import lora as reference
from tests.codegen.triton.claimed import Claimed, normed
from tests.codegen.triton.quantized_weight import quantized_weight
from tests.codegen.triton.tensor_call import TensorCall, check
from tests.quick_sample import quick_sample
from tests.seeded_normal import seeded_normal
from tests.tolerances import GPU_KERNELS

SLOTS, MAX_RANK, CHANNELS, ENDS = 5, 19, 77, [33, 40, 170]


def pools(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ranks = torch.randint(0, MAX_RANK + 1, (SLOTS, len(ENDS)), generator=generator, dtype=torch.int32)
    ranks[0], ranks[1] = MAX_RANK, 0
    a = seeded_normal(2, SLOTS, len(ENDS), MAX_RANK, CHANNELS).to(dtype)
    b = seeded_normal(3, SLOTS, MAX_RANK, ENDS[-1]).to(dtype)
    for slot in range(SLOTS):  # What stands behind an adapter's rank is another's, or nothing yet.
        for part in range(len(ENDS)):
            a[slot, part, int(ranks[slot, part]) :] = torch.nan
    return a, b, ranks


def adapters_of(tokens: int) -> Tensor:
    chosen = torch.randint(0, SLOTS + 1, (tokens,), generator=torch.Generator().manual_seed(tokens), dtype=torch.int32)
    chosen[0] = 1
    return chosen


def computed(device: str, x: Tensor | Claimed, adapters: Tensor, dtype: torch.dtype) -> Tensor:
    a, b, ranks = pools(dtype)
    expected = torch.zeros(len(adapters), ENDS[-1])
    call = TensorCall(lora, (x, a, b, ranks, adapters, ENDS), (expected,), device, in_place=False)
    (launch,) = call.candidates()
    for step in (launch, *launch.then):
        call.run(step)
    return call.results[0].cpu()


@pytest.mark.parametrize("dtype", quick_sample([torch.float32, torch.float16, torch.bfloat16], [torch.float16]))
@pytest.mark.parametrize("tokens", quick_sample([1, 20, 37], [20]))
def test_equals_the_reference(device: str, dtype: torch.dtype, tokens: int) -> None:
    x, adapters = seeded_normal(0, tokens, CHANNELS).to(dtype), adapters_of(tokens)
    y, has = computed(device, x, adapters, dtype), adapters != 0
    expected = reference(x, *pools(dtype), adapters, ENDS)
    torch.testing.assert_close(y[has], expected[has], atol=2e-4, rtol=1e-4)
    assert y[~has].isnan().all()  # left as it was
    for token in range(0, tokens, 9):
        alone = computed(device, x[token : token + 1], adapters[token : token + 1], dtype)
        assert torch.equal(alone[0][has[token]], y[token][has[token]])


def test_after_a_norm_that_its_product_takes_in(device: str) -> None:
    x, weight, adapters = seeded_normal(0, 9, CHANNELS), 1 + seeded_normal(1, CHANNELS) / 4, adapters_of(9)
    y, has = computed(device, normed(x, weight), adapters, torch.float32), adapters != 0
    expected = reference(torch.ops.llmc.rms_norm(x, weight, 1e-5), *pools(torch.float32), adapters, ENDS)
    torch.testing.assert_close(y[has], expected[has], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", quick_sample([1, 3, 20, 70, 131], [3, 70]))
@pytest.mark.parametrize("is_coded", quick_sample([False, True], [False]))
def test_products_add_it_to_the_tokens_that_have_one(device: str, tokens: int, is_coded: bool) -> None:
    x, bias, residual = seeded_normal(0, tokens, 128).half(), seeded_normal(2, 72).half(), seeded_normal(3, tokens, 72)
    weight = quantized_weight("int8", 72, 128, 32).claimed() if is_coded else seeded_normal(1, 72, 128).half()
    adapters = adapters_of(tokens) * (torch.arange(tokens) % 3 != 1)
    delta = seeded_normal(4, tokens, 72).masked_fill((adapters == 0)[:, None], torch.nan)
    checked = partial(check, device=device, tolerance=GPU_KERNELS[torch.float16])
    checked(linear, x, weight, bias, None, delta, adapters)
    checked(fused_linear, x, weight, bias, residual.half(), "gelu_tanh", 0.5, None, delta, adapters)
    checked(gated_linear, x, weight, bias, "silu", None, delta, adapters)


@pytest.mark.slow
def test_tiles_in_pieces_add_it_too(device: str) -> None:
    """The widest of those that tensor descriptors fill, of rows that are aligned."""
    x, adapters = seeded_normal(0, 131, 64).half(), adapters_of(131)
    weight, delta = seeded_normal(1, 320, 64).half(), seeded_normal(4, 131, 320)
    delta = delta.masked_fill((adapters == 0)[:, None], torch.nan)
    launches = check(linear, x, weight, None, None, delta, adapters, device=device, tolerance=1e-3, gap=0)
    # An A100 has no descriptors.
    assert device == "a100" or 256 in {launch.constants.get("OUT_BLOCK") for launch in launches}
    check(gated_linear, x, weight, None, "silu", None, delta, adapters, device=device, tolerance=1e-3, gap=0)
