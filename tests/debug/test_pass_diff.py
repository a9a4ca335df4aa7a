"""The difference that each pass and each rewrite makes, on a clean pipeline and on three spoiled ones."""

from __future__ import annotations

import pytest
import torch

from llmc.debug.pass_diff import diff_passes, pass_range
from llmc.errors import OptionError, PassError
from llmc.frontends.captured import Captured
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes import GraphPass, Numerics, RewriteLog, default, extended
from tests.debug.planted_faults import FAULTS, crash
from tests.family_captures import FamilyCaptures
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_tokens

OPTIONS = BuildOptions()
TOKENS = tiny_tokens(21)


@pytest.fixture
def llama(captured_family: FamilyCaptures) -> Captured:
    return captured_family("llama").captured


def test_every_pass_stays_within_its_class(llama: Captured) -> None:
    told: list[str] = []
    differences = diff_passes(llama, default(), OPTIONS, TOKENS, by_rewrite=True, progress=told.append)
    assert differences.first_over is None and differences.error is None
    by_name = {difference.name: difference for difference in differences.passes}
    assert by_name["fuse_rms_norm"].count == 5 and by_name["page_kv_cache"].numerics == "exact"
    for pass_ in differences.passes:
        assert len(pass_.rewrites) == pass_.count > 0
        assert pass_.difference is not None and pass_.difference.relative < 1e-5 and pass_.difference.top1 == 1.0
    assert told[0] == "captured" and "fuse_rope" in told


@pytest.mark.parametrize("name", quick_sample(FAULTS, ["wrong_epsilon", "swapped_halves"]))
def test_a_wrong_pass_and_its_rewrite_are_named(llama: Captured, name: str) -> None:
    fault, node = FAULTS[name]
    differences = diff_passes(llama, extended(fault), OPTIONS, TOKENS, by_rewrite=True)
    assert differences.first_over is not None and differences.first_over.name == name
    assert [pass_.name for pass_ in differences.passes if pass_.is_over] == [name]
    guilty = [r for r in differences.first_over.rewrites if r.difference is None or not r.difference.within(1e-4)]
    assert [node in r.rewrite.nodes for r in guilty] == [True]
    assert guilty[0].rewrite.made and "modeling_llama.py" in str(guilty[0].rewrite.source)


def test_a_range_of_passes(llama: Captured) -> None:
    differences = diff_passes(llama, default(), OPTIONS, TOKENS, first="fuse_rms_norm", last="fuse_rope")
    assert [pass_.name for pass_ in differences.passes] == ["fuse_rms_norm", "fuse_rope_angles", "fuse_rope"]
    assert pass_range(default(), "fuse_rope", "fuse_rope") == {"fuse_rope"}


@pytest.mark.parametrize(
    ("first", "last", "says"),
    [("fuse_ropes", None, "there is no pass 'fuse_ropes'"), ("fuse_rope", "fuse_rms_norm", "runs after")],
)
def test_a_range_that_is_none(first: str, last: str | None, says: str) -> None:
    with pytest.raises(OptionError, match=says) as error:
        pass_range(default(), first, last)
    assert error.value.fix is not None


def test_a_pass_that_fails_ends_it(llama: Captured) -> None:
    differences = diff_passes(llama, extended(crash), OPTIONS, TOKENS)
    assert isinstance(differences.error, PassError)
    assert differences.error.problem == "pass crash: KeyError: 'a mistake in the pass'"
    assert "planted_faults.py" in str(differences.error.at)
    assert differences.passes[-1].name == "simplify_layout"


def test_a_graph_that_does_not_run_names_the_rewrite(llama: Captured) -> None:
    def outside(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
        (first, *_) = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.kv_write.default)
        log.step("write far away", first)
        with graph.graph.inserting_before(first):
            slots = graph.graph.call_function(torch.ops.aten.add.Tensor, (first.args[4], 100_000))
        first.update_arg(4, slots)

    wrong = GraphPass("outside", outside, Numerics.EXACT, after="page_kv_cache")
    differences = diff_passes(llama, extended(wrong), OPTIONS, TOKENS, by_rewrite=True)
    assert differences.first_over is not None and differences.first_over.name == "outside"
    assert "llmc.kv_write) does not run: index" in str(differences.first_over.error)
    assert differences.first_over.rewrites[0].error is not None
