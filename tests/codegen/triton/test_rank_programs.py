"""Programs of several GPUs: which launches collectives become, and that their kernels compile."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from llmc.codegen.sketch import sketch
from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.device_lowered import DeviceLowered
from llmc.codegen.triton.lowering import lower_device
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Stored
from llmc.options import BuildOptions
from llmc.passes.pipeline import fusion, parallel, serving
from llmc.passes.runner import run_pipeline
from llmc.prediction.device_step import predict_decode
from llmc.prediction.step_price import gpu_price
from llmc.prediction.step_shape import StepShape
from llmc.program import Launch
from llmc.program.rank_memory import PLACE_BYTES
from tests.codegen.triton.offline_compile import compile_checked
from tests.gpu_target import EACH_KIND_OF_GPU, gpu_target
from tests.graph_builder import GraphBuilder
from tests.quick_sample import quick_sample

CHANNELS = 8192
OF_RANKS = {
    "reduce_rows_kernel",
    "sum_gathered_kernel",
    "sum_shares_kernel",
    "gather_channels_kernel",
    "join_channels_kernel",
}
aten = torch.ops.aten


class Unfilled(GraphBuilder):
    """Weights have shapes and no memory: nothing reads them."""

    def weight(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> fx.Node:
        self.recipes[name.replace(".", "_")] = Stored(name, dtype or self.dtype)
        with self.mode:
            return self._placeholder(name.replace(".", "_"), torch.empty(shape, dtype=dtype or self.dtype))


def graph_of(ranks: int, channels: int = CHANNELS, layers: int = 2, *, reads_residual: bool = False) -> ModelGraph:
    """MLPs with a residual stream, of wide rows, cut for so many ranks. reads_residual: also behind the last norm."""
    b = Unfilled(dtype=torch.bfloat16, vocab_size=1000)
    x = b.embedded(channels)
    for layer in range(layers):
        inner = b.call(aten.gelu.default, b.linear(b.rms_norm(x, f"norm{layer}"), f"up{layer}", 4 * channels))
        x = b.call(aten.add.Tensor, x, b.linear(inner, f"down{layer}", channels))
    last = b.rms_norm(x, "norm")
    graph, _ = b.finish(b.call(aten.add.Tensor, last, x) if reads_residual else last)
    return run_pipeline(graph, (*parallel(), *serving(), *fusion()), BuildOptions(tensor_parallel_size=ranks)).graph


def lowered(ranks: int, target: str = "h100", channels: int = CHANNELS, **graph: Any) -> DeviceLowered:
    """Its program for a GPU."""
    limits = BuildOptions(max_batch_tokens=2048, tensor_parallel_size=ranks)
    return lower_device(graph_of(ranks, channels, **graph), gpu_target(target), limits)


def of(program_launches: tuple[Launch, ...], function: str) -> list[Launch]:
    """The launches of a function."""
    return [launch for launch in program_launches if launch.family == function]


def test_a_norm_takes_in_the_sum_over_ranks() -> None:
    """With the residual sum, in one launch for few rows; the library's exchange comes in for more than 512 KiB."""
    launches = lowered(8).program.launches
    fused = [launch for launch in of(launches, "reduce_rows_kernel") if "residual_ptr" in launch.arguments]
    assert len(fused) == 2
    assert not of(launches, "norm_kernel")[1:]  # The first one's sum has another reader, the residual stream.
    for launch, more in zip(fused, of(launches, "exchange_rows"), strict=True):
        assert launch.only is not None and launch.only.last == PLACE_BYTES // (2 * CHANNELS)
        assert more.only is not None and more.only.first == launch.only.last + 1


def test_many_rows_are_normed_in_shares() -> None:
    """Each rank's residual rows stay where they are: nobody reads the others'. (Sequence parallel.)"""
    launches = lowered(8, layers=4).program.launches
    shared = of(launches, "sum_shares_kernel")
    assert len(shared) == 4 and len(of(launches, "gather_shares")) == 4
    for before, after in pairwise(shared):
        assert after.arguments["residual_ptr"] == before.arguments["sum_ptr"]
    gathered = {launch.arguments["y_ptr"] for launch in of(launches, "gather_shares")}
    assert gathered == {launch.arguments["y_ptr"] for launch in shared}


@pytest.mark.parametrize(("layers", "shared"), [(2, 0), (8, 8)])
def test_a_residual_that_is_read_elsewhere_is_gathered_if_that_pays(layers: int, shared: int) -> None:
    """One more gather than the norms of a short chain save."""
    launches = lowered(8, layers=layers, reads_residual=True).program.launches
    shares = of(launches, "sum_shares_kernel")
    gathered = [launch.arguments["y_ptr"] for launch in of(launches, "gather_shares")]
    assert len(shares) == shared and len(gathered) == (shared + 1 if shared else 0)
    if shared:
        assert gathered[-2:] == [shares[-1].arguments["y_ptr"], shares[-1].arguments["sum_ptr"]]
    else:
        assert len(of(launches, "exchange_parts")) == 3


@pytest.mark.parametrize(("ranks", "channels", "function"), [(2, 64, "gather_rows"), (3, 64, "gather_rows")])
def test_a_library_gathers_what_it_cannot_part(ranks: int, channels: int, function: str) -> None:
    """64 channels on three ranks; and of two ranks, where parts would be as many bytes."""
    launches = lowered(ranks, channels=channels).program.launches
    assert not of(launches, "exchange_parts") and of(launches, function)


def test_ranks_without_each_others_memory_use_the_library_alone() -> None:
    launches = lowered(4, "l4", 256).program.launches
    assert not of(launches, "reduce_rows_kernel") and not of(launches, "gather_channels_kernel")
    assert all(launch.only is None for launch in of(launches, "exchange_parts"))


@pytest.mark.parametrize(("tokens", "share"), [(4, 1), (2048, 8)])
def test_a_simulated_rank_norms_its_share_of_many_rows(tokens: int, share: int) -> None:
    """Of few, all of them."""
    h100, step = gpu_target("h100"), replace(StepShape.prefill(tokens), logit_rows=tokens)
    program = sketch(graph_of(8), BuildOptions(max_batch_tokens=2048, tensor_parallel_size=8))
    norms = [launch for launch in program.launches if launch.family == "add_rms_norm"]

    def seconds(*launches: Launch) -> float:
        """But for what it takes to begin them."""
        link = h100.links.of(8)
        return gpu_price(launches, program.limits, 8, h100, link).seconds(step) - len(launches) * h100.launch

    others = [launch for launch in program.launches if launch not in norms]
    assert len(norms) == 2
    assert seconds(*program.launches) - seconds(*others) == pytest.approx(seconds(*norms) / share, rel=1e-3)


def test_a_prediction_counts_what_a_collective_takes_at_least() -> None:
    """Not a fraction of it for one row of many."""
    program, h100 = lowered(8).program, gpu_target("h100")
    predicted = predict_decode(program, h100, requests=1, context=10)
    meetings = {
        name: s for name, s in predicted.kernel_seconds.items() if name.startswith(("reduce_rows", "gather_ch"))
    }
    assert h100.links.within.shot is not None
    assert sum(meetings.values()) >= 4 * h100.links.within.shot.start


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(
    "name", quick_sample([name for name in EACH_KIND_OF_GPU if gpu_target(name).links.within.shot], ["h100"])
)
def test_collectives_compile(name: str, ranks: int, workers: Workers, tmp_path: Path) -> None:
    """For each instruction set, without spilling; one program holds a row of 8192 channels."""
    target = gpu_target(name)
    engine = lowered(ranks, name)
    for file, text in engine.sources.items():
        (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / file).write_text(text)
    kernels = [kernel for kernel in engine.program.launched_kernels() if kernel.function in OF_RANKS]
    assert {kernel.function for kernel in kernels} == OF_RANKS - ({"sum_shares_kernel"} if ranks == 2 else set())
    for kernel, assembly in zip(kernels, compile_checked(kernels, target, workers, tmp_path), strict=True):
        if target.backend == "cuda" and kernel.parameters[0].name == "ranks_ptr":
            lines = assembly.splitlines()
            assert sum("release" in line and "sys" in line for line in lines) == ranks
            assert any("acquire" in line and "sys" in line for line in lines)
        if kernel.constants["CHANNELS"] == CHANNELS:
            assert "ld.global.b16" not in assembly, "values are read one by one"
