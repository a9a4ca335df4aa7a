"""Each rank has some of the experts or some channels of each, and all ranks' sums together are those of all experts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import fx

from llmc.architectures.tiny_config import tiny_architecture
from llmc.codegen.cpp.panel import PANEL
from llmc.errors import PassError
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.call_arguments import call_arguments
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import PerRank, evaluate
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import built_in
from llmc.passes.runner import PipelineResult, run_pipeline
from tests.quick_sample import quick_sample
from tests.tiny_models import saved, tiny_tokens

ops = torch.ops.llmc


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def captured(request: pytest.FixtureRequest, captured_of: Callable[[str], Captured]) -> Captured:
    """Four experts, of which each token goes to two; with biases and a gate of its own, or without."""
    return captured_of(request.param)


@pytest.fixture(scope="module")
def captured_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Captured]:
    """A tiny model of a family, captured once."""

    @functools.cache
    def found(family: str) -> Captured:
        directory = saved(tiny_architecture(family), tmp_path_factory.mktemp(family))
        return capture(directory, BuildOptions(dtype="float32"))

    return found


def cut(captured: Captured, ranks: int, *quantize: str, by_expert: bool = True) -> PipelineResult:
    whole = ranks == 1 or not by_expert
    options = BuildOptions(tensor_parallel_size=ranks, enable_expert_parallel=not whole, quantize=quantize)
    return run_pipeline(captured.graph, built_in(), options, data=ModelData(captured.source))


def products(graph: ModelGraph) -> list[fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=ops.expert_linear.default)


def experts_of(graph: ModelGraph) -> list[int]:
    return [call_arguments(node)["experts"] for node in products(graph)]


def weight_shape(product: fx.Node) -> tuple[int, ...]:
    return tuple(call_arguments(product)["weight"].meta["val"].shape)


@pytest.mark.parametrize(("ranks", "each"), quick_sample([(2, 2), (3, 2), (4, 1)], [(3, 2)]))
@pytest.mark.parametrize("quantize", [(), ("int8",)], ids=["plain", "int8"])
def test_all_ranks_together_are_one(captured: Captured, ranks: int, each: int, quantize: tuple[str, ...]) -> None:
    alone, together = (cut(captured, n, *quantize).graph for n in (1, ranks))
    assert experts_of(alone) == [4] * 4 and experts_of(together) == [each] * 4
    expected, actual = (run_tokens(graph, captured.source, tiny_tokens(33)) for graph in (alone, together))
    assert float((actual - expected).abs().max()) <= 1e-4 * float(expected.max() - expected.min())


# Families by how they gate: in halves, in turns with biases, and with experts that every token goes to beside.
GATED = [("qwen3_moe", 2), ("gpt_oss", 3), ("deepseek_v3", 2), ("mixtral", 4), ("olmoe", 3), ("granitemoe", 2)]
CASES = [*((*case, scheme) for case in GATED for scheme in ("", "int8")), ("qwen3_moe", 3, "int4:g32")]
QUICK = {("qwen3_moe", 3, "int4:g32"), ("gpt_oss", 3, "")}


@pytest.mark.parametrize(("family", "ranks", "scheme"), quick_sample(CASES, QUICK))
def test_channels_of_all_experts_are_cut(
    family: str, ranks: int, scheme: str, captured_of: Callable[[str], Captured]
) -> None:
    """Without the option. What the ranks have is summed once a layer, after it was summed over a token's experts."""
    captured, quantize = captured_of(family), (scheme,) if scheme else ()
    alone, together = (cut(captured, n, *quantize, by_expert=False).graph for n in (1, ranks))
    assert set(experts_of(together)) == {4}
    shapes = [[weight_shape(node) for node in products(graph)] for graph in (alone, together)]
    for (rows, columns), (own_rows, own_columns) in zip(*shapes, strict=True):
        assert own_rows * own_columns <= 0.6 * rows * columns
        assert own_rows % (4 * PANEL) == 0  # Where each expert's rows begin, panels of them do.
    sums = together.graph.find_nodes(op="call_function", target=ops.sum_experts.default)
    assert all([user.target for user in node.users] == [ops.all_reduce.default] for node in sums[:-1])
    expected, actual = (run_tokens(graph, captured.source, tiny_tokens(33)) for graph in (alone, together))
    assert float((actual - expected).abs().max()) <= 1e-4 * float(expected.max() - expected.min())


def test_codes_are_slices_of_those_of_one_rank(captured: Captured) -> None:
    alone, together = (cut(captured, n, "int8").graph for n in (1, 2))
    # A part of each expert that is stored apart, or of all of them together.
    gates = ("experts_0_gate_proj_weight", "experts_gate_up_proj_")
    names = [name for name in together.weights if any(gate in name for gate in gates) and "bias" not in name]
    assert len(names) == 4  # codes and scales of two layers
    for name in names:
        recipe, whole = together.weights[name], evaluate(alone.weights[name], captured.source)
        assert isinstance(recipe, PerRank)
        for rank, part in enumerate(whole.chunk(2)):
            assert torch.equal(evaluate(recipe, captured.source, rank), part)


def test_more_ranks_than_experts_are_an_error(captured: Captured) -> None:
    """Where there are heads enough."""
    options = BuildOptions(tensor_parallel_size=5, enable_expert_parallel=True, disable_passes=("partition",))
    with pytest.raises(PassError, match="5 tensor ranks are more than can be used: a layer's 4 experts") as caught:
        run_pipeline(captured.graph, built_in(), options, data=ModelData(captured.source))
    assert caught.value.fix is not None and "the maximum is tensor_parallel_size=4" in caught.value.fix
