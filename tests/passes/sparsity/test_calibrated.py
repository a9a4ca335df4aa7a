"""Zeros that calibration text chooses: as plain implementations choose them, and better the more a method looks at."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmc.errors import OptionError
from llmc.formats.sparsity import SparseScheme, parse_sparse_scheme
from llmc.graph.call_arguments import call_arguments
from llmc.graph.product_parts import is_product
from llmc.graph.weights import evaluate
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.quantization.calibration import calibration_sequences
from llmc.passes.quantization.column_sweep import gram, prepare
from llmc.passes.quantization.stream import Stream
from llmc.passes.sparsity.choose_zeros import kept_elements
from llmc.passes.sparsity.sparsegpt import sparsegpt
from tests.passes.quantization.quantizing import calibration_file, captured_llama, logit_error, logits
from tests.passes.sparsity.plain_sparsegpt import plain_sparsegpt
from tests.passes.sparsity.sparse_graphs import sparse, sparse_canonical

DEQUANTIZE = torch.ops.llmc.dequantize.default
FORMS = ("0.5", "0.7", "2:4", "4:8")


def _scheme(text: str) -> SparseScheme:
    scheme = parse_sparse_scheme(text)
    assert scheme is not None
    return scheme


def _tokens(columns: int) -> Tensor:
    """Inputs with correlated channels of very different sizes, one of them dead."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns // 2, columns, generator=generator)
    noise = torch.randn(700, columns, generator=generator)
    x = (torch.randn(700, columns // 2, generator=generator) @ mixing + noise) * torch.exp(
        0.5 * torch.randn(columns, generator=generator)
    )
    x[:, 5] = 0
    return x


def _weight(columns: int) -> Tensor:
    return torch.randn(40, columns, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [96, 328])
def test_sparsegpt_is_the_published_one(form: str, columns: int) -> None:
    """Within 1%, over several blocks and the rest of one."""
    x, weight, scheme = _tokens(columns), _weight(columns), _scheme(f"sparsegpt:{form}")
    swept, kept = sparsegpt(weight, prepare(gram([x], columns), scheme), scheme)
    plain = plain_sparsegpt(weight, x, scheme.ratio, scheme.pattern)
    assert float((swept - plain).norm() / plain.norm()) <= 0.01
    assert float(((plain != 0) == kept).float().mean()) >= 0.999
    assert not swept[~kept].any() and not swept[:, 5].any()
    if scheme.pattern is not None:
        assert (kept.unflatten(1, (-1, scheme.pattern[1])).sum(-1) == scheme.pattern[0]).all()
    else:
        assert float((~kept).float().mean()) == pytest.approx(scheme.ratio, abs=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_what_looks_at_more_loses_less(form: str) -> None:
    x, weight, errors = _tokens(256), _weight(256), {}
    for method in ("magnitude", "wanda", "sparsegpt"):
        scheme = _scheme(f"{method}:{form}")
        if method == "sparsegpt":
            value, _ = sparsegpt(weight, prepare(gram([x], 256), scheme), scheme)
        else:
            importance = weight.abs() * (x.square().sum(0).sqrt() if method == "wanda" else 1.0)
            value = weight.masked_fill(~kept_elements(importance, scheme, by_row=method == "wanda"), 0.0)
        errors[method] = float((x @ (value - weight).t()).norm())
    assert errors["sparsegpt"] < errors["wanda"] < errors["magnitude"]


def test_what_follows_makes_up_for_the_rounding_to_the_weights_dtype() -> None:
    x, weight, scheme = _tokens(128), _weight(128).bfloat16(), _scheme("sparsegpt:0.5")
    solver = prepare(gram([x], 128), scheme)
    swept, _ = sparsegpt(weight, solver, scheme)
    after = sparsegpt(weight.float(), solver, scheme)[0].bfloat16()
    assert swept.dtype == torch.bfloat16
    errors = [float((x @ (w.float() - weight.float()).t()).norm()) for w in (swept, after)]
    assert errors[0] < 1.001 * errors[1]


@pytest.mark.parametrize("form", ["0.5", "2:4"])
def test_the_pass_looks_at_inputs_that_sparse_weights_before_made(form: str, tmp_path: Path) -> None:
    """Each product's weight is the plain method's for what its input is in the graph that came out."""
    options = {"calibration": calibration_file(tmp_path)}
    sequences = calibration_sequences(
        captured_llama().graph, parse_options({"calibration_length": 64, **options}), ModelData(captured_llama().source)
    )
    for method in ("wanda", "sparsegpt"):
        graph, scheme = sparse_canonical(f"{method}:{form}", **options).graph, _scheme(f"{method}:{form}")
        stream = Stream(graph, captured_llama().source, sequences)
        products = [n for n in graph.graph.nodes if is_product(n)][:-1]
        for node in stream.stops(products):
            x, name = stream.rows(call_arguments(node)["x"]).float(), call_arguments(node)["weight"].name
            before = evaluate(captured_llama().graph.weights[name], captured_llama().source)
            after = evaluate(graph.weights[name], captured_llama().source)
            if method == "wanda":
                kept = kept_elements(before.abs() * x.norm(dim=0), scheme, by_row=True)
                plain = before.masked_fill(~kept, 0.0)
            else:
                plain = plain_sparsegpt(before, x, scheme.ratio, scheme.pattern).float()
            assert float((after - plain).norm() / plain.norm()) <= 0.01
        assert len(products) == len(graph.sparse) == 14
        assert all(weight.is_output_error and weight.error and weight.error < 1 for weight in graph.sparse)


def test_logits_move_less_the_more_a_method_looks_at(tmp_path: Path) -> None:
    options = {"calibration": calibration_file(tmp_path)}
    errors = [logit_error(sparse_canonical(f"{m}:0.5", **options).graph) for m in ("sparsegpt", "magnitude")]
    assert errors[0] < errors[1]


def test_zeros_are_stored_as_those_of_other_methods(tmp_path: Path) -> None:
    graph = sparse("sparsegpt:0.5", "int8", calibration=calibration_file(tmp_path)).graph
    assert all(weight.bits is not None and weight.bits < 5.6 for weight in graph.sparse)


@pytest.mark.parametrize("quantize", ["int8-gptq", "int4-gptq:g32", "int4-gptq:g32:asym"])
def test_gptq_rounds_what_is_kept_and_leaves_zeros(quantize: str, tmp_path: Path) -> None:
    options, source = {"calibration": calibration_file(tmp_path)}, captured_llama().source
    before = sparse_canonical("sparsegpt:2:4", **options).graph
    after = sparse_canonical("sparsegpt:2:4", f"{quantize},lm_head=none", **options).graph
    nearest = sparse_canonical("sparsegpt:2:4", f"{quantize.replace('-gptq', '')},lm_head=none", **options).graph
    rounded = [node for node in after.graph.nodes if node.target is DEQUANTIZE]
    assert len(rounded) == len(after.sparse)
    for node in rounded:
        name = node.args[0].name.removesuffix("_codes")
        parts = [
            None if argument is None else evaluate(after.weights[argument.name], source) for argument in node.args[:3]
        ]
        assert not DEQUANTIZE(*parts, *node.args[3:])[evaluate(before.weights[name], source) == 0].any()
    errors = [float((logits(graph) - logits(before)).norm()) for graph in (after, nearest)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("wanda:0.5", "sparsity=wanda:0.5 needs activations, but no calibration text is given"),
        ("sparsegpt:2:4", "sparsity=sparsegpt:2:4 needs activations, but no calibration text is given"),
        ("embed_tokens=wanda:0.5", "is looked up and never multiplied, so wanda has no input"),
    ],
)
def test_what_cannot_be_is_an_error_with_a_fix(text: str, problem: str) -> None:
    with pytest.raises(OptionError) as raised:
        sparse_canonical(text)
    assert problem in str(raised.value) and raised.value.fix
