"""The means of queries on calibration text, noted on the graph: they are the model's own, behind norms of queries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.architectures.tiny_config import tiny_architecture
from llmc.errors import OptionError
from llmc.frontends.capture import capture
from llmc.graph.call_arguments import call_arguments
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import evaluate
from llmc.ops.score_expected import pairs
from llmc.options import BuildOptions, parse_options
from llmc.passes.attention.calibrate_queries import calibrate_queries
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import canonical
from llmc.passes.runner import run_pipeline
from tests.end_to_end.calibration_queries import calibration_queries, write_calibration
from tests.graph_builder import llama
from tests.passes.pass_checks import rewrites
from tests.tiny_models import tiny_model, tiny_tokens

POLICY = "triattention:budget=64"


def options(directory: Path) -> BuildOptions:
    return parse_options({"kv_compression": POLICY, **write_calibration(directory)})


def noted(graph: ModelGraph) -> list[Any]:
    return list(graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.query_means.default))


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama+yarn", "glm"])
def test_means_are_those_of_the_model_s_queries(name: str, tmp_path: Path) -> None:
    """Behind the norm of Qwen3's queries; with yarn's factor; of halves of heads, in pairs of neighbours."""
    model = tiny_model(name) if name in ("llama", "qwen3") else tiny_architecture(name)
    captured = capture(model, BuildOptions())
    given, data = options(tmp_path), ModelData(captured.source)
    before = run_pipeline(captured.graph, canonical(), given, data=data).graph
    graph = run_pipeline(before, (calibrate_queries,), given, data=data).graph
    torch.testing.assert_close(
        run_tokens(graph, captured.source, tiny_tokens(20)), run_tokens(before, captured.source, tiny_tokens(20))
    )
    assert rewrites(run_pipeline(graph, (calibrate_queries,), given, data=data).records) == 0
    scale, half = model.model.rotary_emb.attention_scaling, len(model.model.rotary_emb.inv_freq)
    assert (scale != 1) == (name == "llama+yarn")
    for node, queries in zip(noted(graph), calibration_queries(model), strict=True):
        (rope,) = node.users
        interleaved = call_arguments(rope)["interleaved"]
        assert rope.target is torch.ops.llmc.rope.default and interleaved == (name == "glm")
        mean = queries.double().mean(0)
        mean[:, : 2 * half] *= scale
        sizes = scale * torch.hypot(*pairs(queries.double(), half, interleaved)).mean(0)
        expected = torch.cat((mean, sizes - torch.hypot(*pairs(mean, half, interleaved))), dim=1)
        means = evaluate(graph.weights[call_arguments(node)["means"].name], captured.source)
        assert (means[:, mean.shape[1] :] > 0).all()
        torch.testing.assert_close(means, expected.float(), atol=1e-4, rtol=1e-4)


def test_without_the_policy_nothing_is_measured(tmp_path: Path) -> None:
    captured = capture(tiny_model("llama"), BuildOptions())
    given = parse_options({"kv_compression": "h2o:budget=128", **write_calibration(tmp_path)})
    data = ModelData(captured.source)
    result = run_pipeline(captured.graph, (*canonical(), calibrate_queries), given, data=data)
    assert not noted(result.graph)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt2", "layer 0 has keys that positions do not rotate"),
        ("hunyuan_v1_dense", "layer 0 has keys that come from llmc.rms_norm"),
        ("llama4_text", "layer 3 has keys that positions do not rotate"),
        ("deepseek_v3", "layer 0 has keys that come from"),
    ],
)
def test_rotations_that_scores_do_not_know_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    captured = capture(tiny_architecture(name), BuildOptions())
    with pytest.raises(OptionError) as caught:
        run_pipeline(
            captured.graph, (*canonical(), calibrate_queries), options(tmp_path), data=ModelData(captured.source)
        )
    assert reason in caught.value.problem and caught.value.fix


def turn_otherwise(graph: ModelGraph, queries: Any) -> None:
    queries.update_arg(3, True)


def scale_queries(graph: ModelGraph, queries: Any) -> None:
    with graph.graph.inserting_after(queries):
        scaled = graph.graph.call_function(torch.ops.aten.mul.Tensor, (queries, 2.0))
    scaled.meta = dict(queries.meta)
    queries.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)


def compute_frequencies(graph: ModelGraph, queries: Any) -> None:
    (angles,) = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.rope_angles.default)
    with graph.graph.inserting_before(angles):
        faster = graph.graph.call_function(torch.ops.aten.mul.Tensor, (angles.args[1], 2.0))
    faster.meta = dict(angles.args[1].meta)
    angles.update_arg(1, faster)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (turn_otherwise, "layer 0 has queries and keys that are rotated differently"),
        (scale_queries, "layer 0 has queries that come from aten.mul.Tensor, and not from llmc::rope alone"),
        (compute_frequencies, "layer 0 has frequencies that are computed in each step"),
    ],
)
def test_queries_must_be_rotated_as_keys_are(
    change: Callable[[ModelGraph, Any], None], reason: str, tmp_path: Path
) -> None:
    graph, source = llama(layers=1)
    (attention,) = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.attention.default)
    change(graph, call_arguments(attention)["q"])
    with pytest.raises(OptionError, match=reason):
        run_pipeline(graph, (calibrate_queries,), options(tmp_path), data=ModelData(source))
