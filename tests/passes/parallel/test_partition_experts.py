"""Each rank has some of the experts, and all ranks' sums together are those of all experts."""

from __future__ import annotations

import pytest
import torch

from llmc.architectures.tiny_config import tiny_architecture
from llmc.errors import PassError
from llmc.graph.capture import Captured, capture
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import PerRank, evaluate
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import built_in
from llmc.passes.runner import PipelineResult, run_pipeline
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_tokens

ops = torch.ops.llmc


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def captured(request: pytest.FixtureRequest) -> Captured:
    """Four experts, of which each token goes to two; with biases and a gate of its own, or without."""
    return capture(tiny_architecture(request.param), BuildOptions(dtype="float32"))


def cut(captured: Captured, ranks: int, *quantize: str) -> PipelineResult:
    options = BuildOptions(tensor_parallel_size=ranks, enable_expert_parallel=ranks > 1, quantize=quantize)
    return run_pipeline(captured.graph, built_in(), options, data=ModelData(captured.source))


def experts_of(graph: ModelGraph) -> list[int]:
    return [node.args[4] for node in graph.graph.nodes if node.target is ops.expert_linear.default]


@pytest.mark.parametrize(("ranks", "each"), quick_sample([(2, 2), (3, 2), (4, 1)], [(3, 2)]))
@pytest.mark.parametrize("quantize", [(), ("int8",)], ids=["plain", "int8"])
def test_all_ranks_together_are_one(captured: Captured, ranks: int, each: int, quantize: tuple[str, ...]) -> None:
    alone, together = (cut(captured, n, *quantize).graph for n in (1, ranks))
    assert experts_of(alone) == [4] * 4 and experts_of(together) == [each] * 4
    expected, found = (run_tokens(graph, captured.source, tiny_tokens(33)) for graph in (alone, together))
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.max() - expected.min())


def test_codes_are_slices_of_those_of_one_rank(captured: Captured) -> None:
    alone, together = (cut(captured, n, "int8").graph for n in (1, 2))
    names = [name for name in together.weights if "gate_up_proj" in name and "bias" not in name]
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
    assert caught.value.fix is not None and "the most that can be used is tensor_parallel_size=4" in caught.value.fix
