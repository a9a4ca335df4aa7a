"""The runner: numbering, cutting, disabling, provenance, dead code, and passes that break the rules."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from llmc.errors import OptionError, PassError
from llmc.graph.execute import run_tokens
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pass_record import PassRecord, RewriteRecord
from llmc.graph.refusal import Refusal
from llmc.graph.render import render
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.match import Match
from llmc.passes.pipeline import canonical
from llmc.passes.rewrite import Numerics, Rewrite
from llmc.passes.runner import run_pipeline
from tests.passes.canonical.pattern_graphs import WIDTH, PatternGraph

aten = torch.ops.aten


def _double_negation(x: Any) -> Any:
    return aten.neg.default(aten.neg.default(x))


def _twice(x: Any) -> Any:
    return aten.add.Tensor(x, x)


def _doubled(x: Any) -> Any:
    return aten.mul.Tensor(x, 2.0)


ADD_TO_MUL = Rewrite("add_to_mul", (_twice,), _doubled, None, Numerics.EXACT, Stage.CAPTURED)
DROP_NEGATIONS = Rewrite("drop_negations", (_double_negation,), lambda x: x, None, Numerics.EXACT, Stage.CAPTURED)


def _body(x: Any) -> Any:
    for _ in range(3):
        x = aten.exp.default(aten.neg.default(aten.neg.default(aten.add.Tensor(x, x))))
        x = aten.clamp.default(x, 0.5, 2.0)
    return x


def test_rewrites_are_numbered_over_all_passes() -> None:
    made = PatternGraph(_body)
    result = run_pipeline(made.graph, (ADD_TO_MUL, DROP_NEGATIONS), BuildOptions())
    assert [[r.number for r in record.rewrites] for record in result.records] == [[1, 2, 3], [4, 5, 6]]
    assert result.records[0].rewrites[0].description == "add_tensor"
    assert result.records[1].nodes_before - result.records[1].nodes_after == 6
    assert "aten.add.Tensor" in render(made.graph), "the input graph is left alone"


def test_new_nodes_know_their_rewrite_and_source_line() -> None:
    made = PatternGraph(_body)
    trace = '  File "/home/user/model.py", line 12, in forward\n    return x + x'
    for node in made.graph.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        node.meta["stack_trace"] = trace
    result = run_pipeline(made.graph, (ADD_TO_MUL,), BuildOptions())
    (first, second, third) = result.graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert [n.meta["rewrite"] for n in (first, second, third)] == ["#1 add_to_mul", "#2 add_to_mul", "#3 add_to_mul"]
    assert first.meta["stack_trace"] == trace
    assert result.records[0].rewrites[0].source == "user/model.py:12 in forward: return x + x"


@pytest.mark.parametrize("stop_after", range(8))
def test_the_pipeline_is_cut_after_any_rewrite(stop_after: int) -> None:
    made = PatternGraph(_body)
    result = run_pipeline(made.graph, (ADD_TO_MUL, DROP_NEGATIONS), BuildOptions(stop_after=stop_after))
    assert sum(len(r.rewrites) for r in result.records) == min(stop_after, 6)
    assert result.was_cut is (stop_after < 6)
    assert [r.name for r in result.records] == ["add_to_mul", "drop_negations"][: 1 + (stop_after >= 3)]
    assert render(result.graph).count("aten.mul.Tensor") == min(stop_after, 3)
    tokens = [1, 5, 9]
    wanted = run_tokens(made.graph, made.source, tokens)
    torch.testing.assert_close(run_tokens(result.graph, made.source, tokens), wanted)


def test_passes_can_be_disabled_by_name() -> None:
    made = PatternGraph(_body)
    result = run_pipeline(made.graph, (ADD_TO_MUL, DROP_NEGATIONS), BuildOptions(disable_passes=("add_to_mul",)))
    assert [r.name for r in result.records] == ["drop_negations"]
    with pytest.raises(OptionError, match="there is no pass 'add_to_mull' to disable") as error:
        run_pipeline(made.graph, (ADD_TO_MUL,), BuildOptions(disable_passes=("add_to_mull",)))
    assert error.value.fix == "did you mean 'add_to_mul'?"


def test_an_observer_sees_every_pass() -> None:
    seen: list[tuple[str, int, str]] = []

    def observe(record: PassRecord, graph: ModelGraph) -> None:
        seen.append((record.name, len(record.rewrites), graph.stage.value))

    run_pipeline(PatternGraph(_body).graph, (ADD_TO_MUL, DROP_NEGATIONS), BuildOptions(), observe)
    assert seen == [("add_to_mul", 3, "captured"), ("drop_negations", 3, "captured")]


def test_a_replacement_of_another_shape_is_an_error() -> None:
    wrong = dataclasses.replace(ADD_TO_MUL, replacement=lambda x: aten.sum.dim_IntList(x, [1], True))
    with pytest.raises(PassError, match=r"pass add_to_mul: the replacement of float32\[\w+, 8\] is float32\[\w+, 1\]"):
        run_pipeline(PatternGraph(_body).graph, (wrong,), BuildOptions())


def test_a_replacement_that_the_op_does_not_accept_is_an_error() -> None:
    wrong = dataclasses.replace(ADD_TO_MUL, replacement=lambda x: aten.matmul.default(x, x))
    with pytest.raises(PassError, match=r"pass add_to_mul: aten\.matmul\.default does not accept"):
        run_pipeline(PatternGraph(_body).graph, (wrong,), BuildOptions())


def test_a_refusal_is_recorded_with_what_the_node_was() -> None:
    def precondition(match: Match) -> Refusal:
        return Refusal(f"{match.root.name} is a sum, expected a product", match.root)

    careful = dataclasses.replace(ADD_TO_MUL, precondition=precondition)
    (record,) = run_pipeline(PatternGraph(_body).graph, (careful,), BuildOptions()).records
    refused = record.refusals[0]
    assert (refused.op, refused.type) == ("aten.add.Tensor", f"float32[T, {WIDTH}]")
    assert (refused.found, refused.expected) == (f"{refused.node} is a sum", "a product")
    assert [(u.op, u.type) for u in refused.users] == [("aten.neg", f"float32[T, {WIDTH}]")]
    assert refused.extra_users == ()
    json.dumps(record.to_json())


def test_users_that_a_reason_names_are_in_the_way() -> None:
    def precondition(match: Match) -> Refusal:
        return Refusal(f"{match.root.name} is used by {next(iter(match.root.users)).name}", match.root)

    careful = dataclasses.replace(ADD_TO_MUL, precondition=precondition)
    (record,) = run_pipeline(PatternGraph(_body).graph, (careful,), BuildOptions()).records
    assert [r.extra_users for r in record.refusals] == [(r.users[0].name,) for r in record.refusals]


def test_a_pass_that_raises_is_named_with_the_line() -> None:
    def replacement(x: Any) -> Any:
        raise KeyError("mistake")

    wrong = dataclasses.replace(ADD_TO_MUL, replacement=replacement)
    with pytest.raises(PassError, match="pass add_to_mul: KeyError: 'mistake'") as error:
        run_pipeline(PatternGraph(_body).graph, (wrong,), BuildOptions())
    assert "test_runner.py" in str(error.value.at) and "in replacement" in str(error.value.at)


def test_rewrites_can_be_watched_and_name_what_they_made() -> None:
    made = PatternGraph(_body)
    seen: list[tuple[str, int, int]] = []

    def watch(name: str, record: RewriteRecord, graph: ModelGraph) -> None:
        seen.append((name, record.number, render(graph).count("aten.add.Tensor")))
        run_tokens(graph, made.source, [1, 5, 9])

    result = run_pipeline(made.graph, (ADD_TO_MUL,), BuildOptions(), before_rewrite=watch)
    assert [(name, number) for name, number, _ in seen] == [("add_to_mul", n) for n in (1, 2, 3)]
    assert [r.made for r in result.records[0].rewrites] == [
        ("add_to_mul_mul",),
        ("add_to_mul_mul_1",),
        ("add_to_mul_mul_2",),
    ]


def test_a_cut_pipeline_can_be_finished() -> None:
    made = PatternGraph(_body)
    options = BuildOptions(stop_after=1, finish_cut=True)
    result = run_pipeline(made.graph, (ADD_TO_MUL, DROP_NEGATIONS), options, essential={"drop_negations"})
    assert result.was_cut and [len(r.rewrites) for r in result.records] == [1, 3]


def test_a_rewrite_that_feeds_itself_is_an_error() -> None:
    endless = dataclasses.replace(ADD_TO_MUL, replacement=lambda x: aten.add.Tensor(x, x))
    with pytest.raises(PassError, match="still finds candidates after 64 rounds"):
        run_pipeline(PatternGraph(_body).graph, (endless,), BuildOptions())


def test_a_pass_that_leaves_an_illegal_graph_is_an_error() -> None:
    claims = dataclasses.replace(ADD_TO_MUL, stage=Stage.CANONICAL)
    body_with_tril = PatternGraph(lambda x: aten.tril.default(aten.add.Tensor(x, x)))
    with pytest.raises(PassError, match=r"node tril_default: aten\.tril\.default is not legal at stage canonical"):
        run_pipeline(body_with_tril.graph, (claims,), BuildOptions())


def test_writes_to_memory_are_not_dead_code_and_unused_weights_are() -> None:
    def body(x: Any, weight: Any) -> Any:
        aten.mul.Tensor(x, weight)
        return aten.add.Tensor(x, x)

    result = run_pipeline(PatternGraph(body, weight=(WIDTH,)).graph, (ADD_TO_MUL,), BuildOptions())
    assert "weight" not in result.graph.weights
    assert [n.name for n in result.graph.weight_nodes()] == ["embed"]


def test_near_misses_are_those_of_the_last_look() -> None:
    def one_user(match: Match) -> Refusal | None:
        users = len(match.bound["x"].users)
        return None if users == 1 else Refusal(f"x has {users} users", match.root)

    def body(x: Any) -> Any:
        y = aten.exp.default(x)
        first = aten.neg.default(aten.neg.default(y))
        return aten.mul.Tensor(first, aten.neg.default(aten.neg.default(first)))

    drop = dataclasses.replace(DROP_NEGATIONS, precondition=one_user)
    (record,) = run_pipeline(PatternGraph(body).graph, (drop,), BuildOptions()).records
    # The second pair is refused in both rounds, for `first` and then for y, and recorded for the last one.
    assert len(record.rewrites) == 1
    assert [r.reason for r in record.refusals] == ["x has 2 users"]


def test_records_are_plain_data() -> None:
    (record,) = run_pipeline(PatternGraph(_body).graph, (ADD_TO_MUL,), BuildOptions()).records
    data = json.loads(json.dumps(record.to_json()))
    assert (data["name"], data["stage"]) == ("add_to_mul", record.stage.value)
    assert [r["number"] for r in data["rewrites"]] == [r.number for r in record.rewrites]
    assert "seconds" not in data


def test_the_same_input_gives_the_same_records_and_graph() -> None:
    first, second = (run_pipeline(PatternGraph(_body).graph, (ADD_TO_MUL,), BuildOptions()) for _ in range(2))
    assert render(first.graph) == render(second.graph)
    assert [r.to_json() for r in first.records] == [r.to_json() for r in second.records]


def test_pass_names_are_unique() -> None:
    names = [p.name for p in canonical()]
    assert len(names) == len(set(names))
