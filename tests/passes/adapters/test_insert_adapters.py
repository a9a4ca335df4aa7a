"""What the pass says of its rewrites: the pools first, then each product with the modules that it has the rows of."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.errors import PassError
from llmc.frontends.capture import capture
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from tests.gguf_blocks import write_every_block
from tests.quantized_checkpoints import GROUP, gptq_writer, tiny_llama, write_quantized
from tests.tiny_models import tiny_checkpoint


def test_every_rewrite_says_what_it_is_about(tmp_path: Path) -> None:
    options = parse_options({"enable_lora": True, "max_loras": 2, "max_lora_rank": 8})
    graph = capture(tiny_checkpoint("llama", tmp_path), options).graph
    (record,) = (entry for entry in run_pipeline(graph, default(), options).records if entry.name == "insert_adapters")
    pools, *products = record.rewrites
    assert (pools.description, pools.nodes) == ("declare the pools of adapters", (graph.inputs()[0].name,))
    modules = (f"layers.0.self_attn.{name}_proj" for name in "qkv")
    assert products[0].description == " + ".join(modules)
    assert len(products) == 4 * 2 and all(len(product.nodes) == 1 for product in products)


def test_weights_that_a_file_has_as_codes(tmp_path: Path) -> None:
    write_every_block(tmp_path / "model.gguf")
    assert _adapted(tmp_path / "model.gguf") == _EVERY_LAYER


def test_weights_that_a_checkpoint_has_as_codes(tmp_path: Path) -> None:
    """In the order of their groups: adapters read x as it was before."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": True}
    write_quantized(tmp_path, tiny_llama(), config, gptq_writer(symmetric=True, act_order=True, stored_offset=1))
    assert _adapted(tmp_path) == _EVERY_LAYER


_LINEARS = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
_EVERY_LAYER = {f"layers.{layer}.{name}_proj" for layer in range(2) for name in _LINEARS}


def _adapted(model: Path) -> set[str]:
    """The modules that adapters can change."""
    options = parse_options({"enable_lora": True})
    captured = capture(model, options)
    graph = run_pipeline(captured.graph, default(), options, data=ModelData(captured.source)).graph
    assert graph.adapters is not None
    return {module.name for product in graph.adapters.products for module in product.modules} - {"lm_head"}


def test_names_that_no_layer_has(tmp_path: Path) -> None:
    options = parse_options({"enable_lora": True, "lora_targets": ("query",)})
    graph = capture(tiny_checkpoint("llama", tmp_path), options).graph
    with pytest.raises(PassError, match="adapters can change none") as caught:
        run_pipeline(graph, default(), options)
    assert caught.value.fix is not None and "down_proj" in caught.value.fix
