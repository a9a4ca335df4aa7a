"""Zeros where the option asks for them, taken out of what is stored, and every graph on the way computes the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.codegen.expand_sparse import expand_sparse
from llmc.errors import CheckpointError, LlmcError, OptionError
from llmc.formats.sparsity import SparseScheme, parse_sparse_scheme
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.frontends.checkpoints.memory_source import MemorySource
from llmc.graph.render import op_name
from llmc.graph.weights import evaluate
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from llmc.passes.sparsity.choose_zeros import kept_elements
from llmc.passes.sparsity.sparsify import sparsify
from tests.family_captures import FamilyCaptures
from tests.gguf_blocks import write_every_block
from tests.gguf_families import family_model
from tests.gguf_files import write_gguf
from tests.passes.pruning.pruned_models import pruned
from tests.passes.quantization.quantizing import captured_llama, logits, quantized
from tests.passes.sparsity.sparse_graphs import sparse, sparse_canonical

DOWN = "model_layers_0_mlp_down_proj_weight"


@pytest.mark.parametrize("ratio", [0.5, 0.7, 0.33])
def test_magnitude_keeps_the_largest_of_the_matrix(ratio: float) -> None:
    graph = sparse_canonical(f"magnitude:{ratio}").graph
    before, after = (evaluate(g.weights[DOWN], captured_llama().source) for g in (captured_llama().graph, graph))
    kept = after != 0
    assert int((~kept).sum()) == round(ratio * before.numel())
    assert torch.equal(after[kept], before[kept])
    assert before[kept].abs().min() >= before[~kept].abs().max()
    record = next(weight for weight in graph.sparse if weight.module == "model.layers.0.mlp.down_proj")
    error = float((after - before).square().sum().sqrt() / before.square().sum().sqrt())
    assert record.zeros == pytest.approx(ratio, abs=1e-3) and record.error == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize(("text", "kept", "of"), [("magnitude:2:4", 2, 4), ("magnitude:4:8", 4, 8)])
def test_a_pattern_holds_in_each_run_of_columns(text: str, kept: int, of: int) -> None:
    graph = sparse_canonical(text).graph
    runs = evaluate(graph.weights[DOWN], captured_llama().source).unflatten(1, (-1, of))
    assert ((runs != 0).sum(-1) == kept).all()


def test_equal_elements_are_kept_from_the_first_on() -> None:
    scheme = parse_sparse_scheme("magnitude:0.5")
    assert scheme is not None
    kept = kept_elements(torch.ones(2, 6), scheme, by_row=False)
    assert kept.tolist() == [[True] * 6, [False] * 6]
    by_row = kept_elements(torch.ones(2, 6), scheme, by_row=True)
    assert by_row.tolist() == [[True] * 3 + [False] * 3] * 2


@pytest.mark.parametrize("digits", [0, 1, 7])
def test_the_largest_of_a_matrix_are_those_that_sorting_finds(digits: int) -> None:
    """With many equal elements, with some, and with none."""
    importance = torch.randn(41, 37, generator=torch.Generator().manual_seed(digits)).abs()
    importance = importance.mul(10**digits).round() / 10**digits
    for ratio in (0.001, 0.3, 0.5, 0.999):
        kept = kept_elements(importance, SparseScheme("", "magnitude", ratio), by_row=False)
        order = importance.flatten().argsort(descending=True, stable=True)
        assert set(kept.flatten().nonzero().flatten().tolist()) == set(order[: int(kept.sum())].tolist())
        assert int((~kept).sum()) == round(ratio * importance.numel())


@pytest.mark.parametrize(
    ("quantize", "stored"), [("", "sparse_bitmask"), ("int8", "sparse_codes"), ("w8a8", "sparse_codes")]
)
def test_what_is_stored_computes_what_the_zeros_do(quantize: str, stored: str) -> None:
    """Merged products are stored as one; the output projection stays dense."""
    zeros, stored_as = sparse_canonical("magnitude:0.5", quantize), sparse("magnitude:0.5", quantize)
    torch.testing.assert_close(logits(stored_as.graph), logits(zeros.graph), rtol=1e-4, atol=2e-4)
    ops = Counter(op_name(n.target) for n in stored_as.graph.graph.nodes if n.op == "call_function")
    assert ops[f"llmc.{stored}"] == 8
    assert all(weight.bits is not None and weight.reason is None for weight in stored_as.graph.sparse)
    expanded = expand_sparse(stored_as.graph, lambda storage: "as a test")
    assert torch.equal(logits(expanded), logits(stored_as.graph))
    assert {weight.reason for weight in expanded.sparse} == {"as a test"}
    assert {op_name(n.target) for n in expanded.graph.nodes} & {"llmc.sparse_bitmask", "llmc.sparse_codes"} == set()


def test_bits_are_those_of_what_is_stored() -> None:
    graph = sparse("magnitude:0.7").graph
    stored = [n for n in graph.graph.nodes if op_name(n.target) == "llmc.sparse_bitmask"]
    nbytes = sum(part.meta["val"].numel() * part.meta["val"].dtype.itemsize for n in stored for part in n.args[:2])
    elements = sum(n.meta["val"].numel() for n in stored)
    mean = sum(weight.bits * weight.rows * weight.columns for weight in graph.sparse if weight.bits) / elements
    assert mean == pytest.approx(8 * nbytes / elements, rel=1e-3) == pytest.approx(32 * 0.3 + 1, rel=1e-2)


def test_rules_choose_weights_and_the_head_needs_one() -> None:
    zeros = {
        weight.module: weight.zeros for weight in sparse("magnitude:0.5,o_proj=none,lm_head=magnitude:2:4").graph.sparse
    }
    assert zeros["lm_head"] == 0.5 and not [name for name in zeros if name.endswith("o_proj")]
    plain = sparse_canonical("magnitude:0.5")
    assert "lm_head" not in {weight.module for weight in plain.graph.sparse}
    assert any("decides on every token" in r.reason for record in plain.records for r in record.refusals)


@pytest.mark.parametrize(
    ("sparsity", "quantize", "reason"),
    [
        ("magnitude:0.02", "", "bits per weight with masks"),
        ("magnitude:0.5", "int4:g32", "its codes are int4"),
        ("magnitude:0.5", "int8:asym", "int8 with zero points"),
    ],
)
def test_what_stays_dense_says_why(sparsity: str, quantize: str, reason: str) -> None:
    result = sparse(sparsity, quantize)
    (record,) = (record for record in result.records if record.name == "store_sparse")
    assert not record.rewrites and all(reason in refusal.reason for refusal in record.refusals)
    assert all(weight.reason is not None and reason in weight.reason for weight in result.graph.sparse)


def test_each_weight_is_one_numbered_rewrite_and_twice_is_once() -> None:
    result = quantized("", passes=(sparsify,), sparsity="magnitude:0.5")
    assert [r.number for r in result.records[0].rewrites] == list(range(1, 15))
    assert result.records[0].rewrites[0].description == "model.layers.0.self_attn.q_proj to magnitude:0.5"
    again = quantized("", passes=(sparsify,), sparsity="magnitude:0.5", captured=_with(result.graph))
    assert not again.records[0].rewrites


def test_a_cut_between_two_weights_leaves_a_graph_that_runs() -> None:
    cut = sparse_canonical("magnitude:0.5", stop_after=5)
    assert cut.was_cut and len(cut.graph.sparse) == 5
    assert logits(cut.graph).isfinite().all()


@pytest.mark.parametrize("noted", [False, True])
def test_a_checkpoints_zeros_are_found(noted: bool) -> None:
    given = captured_llama()
    tensors = {name: given.source.load(name).clone() for name in given.source.names()}
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][:, ::2] = 0.0
    if not noted:  # a few zeros are no reason
        tensors[name][:, ::2] = 1e-3
        tensors[name][0] = 0.0
    result = quantized("", captured=Captured(given.graph, MemorySource(tensors)))
    assert [weight.tensor for weight in result.graph.sparse] == ([name] if noted else [])
    assert not noted or result.graph.sparse[0].zeros == 0.5


def test_a_weight_of_zeros_is_refused_by_name() -> None:
    given = captured_llama()
    tensors = {name: given.source.load(name).clone() for name in given.source.names()}
    tensors["model.layers.1.mlp.up_proj.weight"].zero_()
    captured = Captured(given.graph, MemorySource(tensors))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight \[.*holds nothing but zeros"):
        quantized("", captured=captured, sparsity="magnitude:0.5")
    plain = quantized("", captured=captured)
    assert any(
        "rows of model.layers.1.mlp.up_proj.weight hold nothing but zeros" in r.reason
        for record in plain.records
        for r in record.refusals
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("magnitude:1.5", "no ratio of zeros between 0 and 1"),
        ("magnitude:0", "no ratio of zeros between 0 and 1"),
        ("magnitude", "no ratio of zeros between 0 and 1"),
        ("magnitude:3:4", "3:4 is not a pattern"),
        ("magnitud:0.5", "unknown way to choose zeros 'magnitud'"),
        ("magnitude:0.5,wanda:0.5", "two schemes for all weights"),
        ("dwn_proj=magnitude:0.5", "no weight is called 'dwn_proj'"),
    ],
)
def test_what_cannot_be_is_an_error_with_a_fix(text: str, problem: str) -> None:
    with pytest.raises(OptionError) as raised:
        sparse_canonical(text)
    assert problem in str(raised.value)
    assert isinstance(raised.value, LlmcError) and raised.value.fix


@pytest.mark.parametrize(
    ("text", "problem", "at", "fix"),
    [
        ("magnitude:auto:1.5", "'magnitude:auto:1.5' has no ratio", "magnitude:auto:1.5", "magnitude:auto:0.5"),
        ("magnitude:auto", "'magnitude:auto' has no ratio", "magnitude:auto", "magnitude:auto:0.5"),
        ("lm_head=foo:0.5", "unknown way to choose zeros 'foo'", "lm_head=foo:0.5", "magnitude:0.5"),
        ("lm_head=", "unknown way to choose zeros ''", "lm_head=", "magnitude:0.5"),
        ("=magnitude:0.5", "'=magnitude:0.5' names no weights", "=magnitude:0.5", "lm_head=magnitude:0.5"),
        ("none:0.5", "'none:0.5': none takes no ratio", "none:0.5", "magnitude:0.5"),
        ("magnitude:0.0000001", "1e-07 of the 8192 elements of", "magnitude:0.0000001", "a larger ratio"),
        (",", "build option 'sparsity' cannot be ','", "','", "sparsity='magnitude:0.5'"),
        (0.5, "build option 'sparsity' cannot be 0.5: it must be a text", "0.5", "sparsity='magnitude:0.5'"),
        (None, "build option 'sparsity' cannot be None: it must be a text", "None", "sparsity='magnitude:0.5'"),
        ({"lm_head": 0.5}, "build option 'sparsity' cannot be {'lm_head'", "{'lm_head'", "sparsity='magnitude:0.5'"),
    ],
)
def test_errors_name_what_was_written(text: Any, problem: str, at: str, fix: str) -> None:
    with pytest.raises(OptionError) as raised:
        sparse_canonical(text)
    assert problem in raised.value.problem
    assert raised.value.at is not None and raised.value.at.startswith(f"sparsity={at}")
    assert raised.value.fix is not None and fix in raised.value.fix


def test_a_tied_embedding_is_called_by_what_it_multiplies(captured_family: FamilyCaptures) -> None:
    with pytest.raises(OptionError, match=r"no weight is called 'transformer\.wte'") as raised:
        pruned(captured_family("gpt2"), "", None, sparsity="transformer.wte=magnitude:0.5")
    assert raised.value.fix is not None and "did you mean lm_head?" in raised.value.fix


def _with(graph: object) -> Captured:
    return Captured(graph, captured_llama().source)  # type: ignore[arg-type]


def test_a_model_of_stored_codes_is_refused(tmp_path: Path) -> None:
    write_every_block(tmp_path / "model.gguf")
    options = parse_options({"sparsity": "magnitude:0.5"})
    captured = capture(tmp_path / "model.gguf", options)
    with pytest.raises(OptionError, match="weights are stored as codes") as caught:
        run_pipeline(captured.graph, default(), options, data=ModelData(captured.source))
    assert caught.value.fix == "decode the codes to numbers first: --quantize none"


def test_products_of_stored_codes_are_named_where_others_become_sparse(tmp_path: Path) -> None:
    dense = "blk.0.ffn_up.weight"
    model = family_model("llama")
    write_gguf(tmp_path / "model.gguf", model, "Q8_0", kinds={dense: "F32"})
    options = parse_options({"sparsity": "magnitude:0.5"})
    captured = capture(tmp_path / "model.gguf", options)
    result = run_pipeline(captured.graph, default(), options, data=ModelData(captured.source))
    assert [weight.module for weight in result.graph.sparse] == ["model.layers.0.mlp.up_proj"]
    [record] = [record for record in result.records if record.name == "sparsify"]
    left = [refusal.reason for refusal in record.refusals]
    assert (
        left.count("its weight is stored as codes, which stay as they are") == len(result.graph.quantized) - 1
    )  # the embedding is looked up
