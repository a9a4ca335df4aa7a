"""What is said of a model that is cut for several ranks: its weights, what they exchange, and Hugging Face's plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmc.architectures.tiny_config import tiny_architecture
from llmc.debug.explain_model import explain_model
from llmc.engine_format import read_engine
from llmc.frontends.capture import capture
from llmc.options import parse_options
from llmc.passes.pipeline import default
from llmc.program import RankLayout
from llmc.report.contents import read_contents
from llmc.report.explanation import Explanation
from llmc.report.explanation_text import overview_lines
from llmc.report.page.page import report_page, script
from llmc.report.placements.hf_plan import beside, hf_plan
from llmc.report.placements.record import PlacedWeight
from tests.quick_sample import quick_sample
from tests.tiny_models import saved

MODEL = Path(__file__).parents[2] / "examples" / "models" / "bard-6m"


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    """The shipped model on four ranks: four query heads, two of keys."""
    options = parse_options({"tensor_parallel_size": 4})
    return explain_model(capture(MODEL, options, may_lack_weights=True), default(), options)


def test_each_kind_of_weight_is_one_row_with_its_part(explanation: Explanation) -> None:
    assert explanation.ranks is not None
    by_name = {weight.name: weight for weight in explanation.ranks.placements.weights}
    keys = by_name["model.layers.*.self_attn.k_proj.weight"]
    assert (keys.count, keys.shape, keys.axis, keys.parts, keys.nbytes) == (6, (128, 256), 0, (64,) * 4, 64 * 256 * 2)
    assert "2 ranks keep the same" in keys.why
    down = by_name["model.layers.*.mlp.down_proj.weight"]
    assert (down.axis, down.parts) == (1, (192,) * 4) and "all_reduce adds up" in down.why
    norm = by_name["model.norm.weight"]
    assert norm.axis is None and "all ranks have" in norm.why
    both = by_name["model.embed_tokens.weight"]
    assert both.length == 4096 // 4 + 1 and "look up zeros" in both.why and "all_gather joins them" in both.why


def test_more_ranks_than_heads() -> None:
    options = parse_options({"tensor_parallel_size": 8})
    explained = explain_model(capture(MODEL, options, may_lack_weights=True), default(), options)
    assert explained.ranks is None and explained.error is not None
    assert "4 of the ranks would get none" in explained.error.problem
    assert explained.error.fix == "the maximum is tensor_parallel_size=4"


def test_collectives_say_what_they_bring_together(explanation: Explanation) -> None:
    assert explanation.ranks is not None
    collectives = [
        (collective.op, collective.count, collective.token_bytes)
        for collective in explanation.ranks.placements.collectives
    ]
    assert collectives == [
        ("all_reduce", 1, 512),
        ("all_reduce", 6, 512),
        ("all_reduce", 6, 512),
        ("all_gather", 1, 16384),
    ]
    assert explanation.ranks.stages[0].memory.kv_token == 6 * 64 * 2 * 2


def test_it_is_said_in_lines_and_as_json(explanation: Explanation) -> None:
    text = "\n".join(line.text for line in overview_lines("bard", explanation))
    assert "6 × model.layers.*.self_attn.k_proj.weight [128 × 256]: rows, 64 a rank" in text
    assert "23040 bytes per token in 14 collectives" in text
    assert "16384 bytes per token; on CPUs 32 where only tokens are needed" in text
    assert "30 of 43 weights are split alike" in text
    data = json.loads(json.dumps(explanation.to_json()))["ranks"]
    assert data["ranks"] == 4 and [stage["memory"]["kv_token"] for stage in data["stages"]] == [1536]
    beside = {weight["name"].split(".")[-2]: weight["beside"] for weight in data["weights"]}
    assert beside["q_proj"] == "same" and beside["embed_tokens"] == "not in its plan: every rank has it whole"
    assert beside["k_proj"] == "it cuts rows, evenly, through what has to stay together, such as a head"


def test_the_report_says_the_same(explanation: Explanation, draft_engine: Path) -> None:
    """With Hugging Face's plan."""
    assert explanation.ranks is not None
    directory = read_engine(draft_engine)
    program = replace(directory.program, layout=RankLayout(tensor=4))
    contents = read_contents(directory.files, directory.manifest, program)
    page = report_page(replace(contents, placements=explanation.ranks.placements))
    data = json.loads(page.partition('<script id="data" type="application/json">')[2].partition("</script>")[0])
    said, shown = explanation.ranks.to_json(), data["ranks"]
    assert {**shown, "stages": None} == {**json.loads(json.dumps(said)), "stages": None}
    assert [(stage["first"], stage["last"]) for stage in shown["stages"]] == [(0, 3)]
    assert shown["agreement"] == [43, 30]
    assert "Compared with Hugging Face's plan" in script()


def test_one_rank_has_no_placements() -> None:
    options = parse_options({})
    assert explain_model(capture(MODEL, options, may_lack_weights=True), default(), options).ranks is None


@pytest.mark.parametrize("tensor", quick_sample([1, 2], [2]))
def test_stages_say_their_ranks_memory_and_what_they_hand_over(tensor: int) -> None:
    options = parse_options({"tensor_parallel_size": tensor, "pipeline_parallel_size": 2})
    explained = explain_model(capture(MODEL, options, may_lack_weights=True), default(), options)
    assert explained.ranks is not None
    first, last = explained.ranks.stages
    assert (first.first, first.last, last.first, last.last) == (0, tensor - 1, tensor, 2 * tensor - 1)
    assert first.memory.kv_token + last.memory.kv_token == 6 * 2 * (2 // tensor) * 64 * 2
    assert (first.token_bytes, last.token_bytes) == (256 * 4, 0)
    text = "\n".join(line.text for line in overview_lines("bard", explained))
    ranks = "rank 0" if tensor == 1 else "ranks 0–1"
    assert f"on {2 * tensor} ranks in 2 stages" in text and f"stage 0, {ranks}: memory per rank: weights 0.0" in text
    assert "hands over 1024 bytes per token" in text and ("split alike" in text) is (tensor > 1)
    assert "where only tokens are wanted" not in text


def test_experts_say_whether_they_or_their_channels_are_divided(tmp_path: Path) -> None:
    captured = capture(saved(tiny_architecture("gpt_oss"), tmp_path), parse_options({}))
    for divided, part in ((True, "of the experts"), (False, "channels of each expert's result")):
        options = parse_options({"tensor_parallel_size": 2, "enable_expert_parallel": divided})
        ranks = explain_model(captured, default(), options).ranks
        assert ranks is not None
        (router,) = (weight for weight in ranks.placements.weights if weight.name.endswith("router.weight"))
        assert router.axis is None and router.why.startswith("exchanging parts between ranks would take longer")
        of = {weight.name: weight for weight in ranks.placements.weights if "experts" in weight.name}
        gate = of["model.layers.*.mlp.experts.gate_up_proj"]
        assert (gate.shape, gate.parts, gate.why) == ((896, 64), (448, 448), f"rows: each rank has some {part}")
        bias = of["model.layers.*.mlp.experts.down_proj_bias"]
        assert bias.parts == ((128, 128) if divided else (256, 0)) and ("adds it" in bias.why) is not divided


def test_how_plans_differ() -> None:
    assert hf_plan("llama")["layers.*.mlp.down_proj"] == "rowwise"
    assert hf_plan("no such family") == {}
    output = PlacedWeight(
        "lm_head.weight", 1, (8, 8), 0, (4, 4), 4, 64, "rows: some of them, and all_gather joins them"
    )
    assert beside(output, hf_plan("llama")) == "same"
    assert beside(replace(output, why="rows"), hf_plan("llama")) == "it cuts rows and gathers what comes out"
    weight = PlacedWeight("model.layers.*.mlp.down_proj.weight", 2, (8, 8), 0, (4, 4), 4, 64, "")
    assert beside(weight, {}) is None
    through = "it cuts rows, evenly, through what has to stay together, such as a head"
    plan = {"layers.*.mlp.down_proj": "colwise"}
    for parts, said in (((3, 3, 2), "same"), ((4, 2, 2), through), ((4, 4, 4), through)):
        assert beside(replace(weight, parts=parts), plan) == said
    assert beside(replace(weight, shape=(10, 8), parts=(6, 4), runs=2), plan) == "same"
    assert beside(replace(weight, axis=None, why="it is a single head"), plan) == through
    assert beside(replace(weight, axis=None), plan) == "it cuts rows"
    assert beside(weight, {"layers.*.mlp.down_proj": "colwise"}) == "same"
    assert beside(weight, {"layers.*.mlp.down_proj": "rowwise"}) == "it cuts columns"
    assert (
        beside(weight, {"layers.*.mlp.down_proj": "colwise_gather_output"}) == "it cuts rows and gathers what comes out"
    )
    assert beside(weight, {"layers.*.mlp.down_proj": "mla_kv_a_proj"}) == "its style 'mla_kv_a_proj'"
    assert beside(weight, {"layers.*.mlp.up_proj": "colwise"}) == "not in its plan: every rank has it whole"
