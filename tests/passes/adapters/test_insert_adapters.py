"""What the pass says of its rewrites: the pools first, then each product with the modules that it has the rows of."""

from __future__ import annotations

from pathlib import Path

from llmc.frontends.capture import capture
from llmc.options import parse_options
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from tests.tiny_models import tiny_checkpoint


def test_every_rewrite_says_what_it_is_about(tmp_path: Path) -> None:
    options = parse_options({"enable_lora": True, "max_loras": 2, "max_lora_rank": 8})
    graph = capture(tiny_checkpoint("llama", tmp_path), options).graph
    (record,) = (each for each in run_pipeline(graph, default(), options).records if each.name == "insert_adapters")
    pools, *products = record.rewrites
    assert (pools.description, pools.nodes) == ("declare the pools of adapters", (graph.inputs()[0].name,))
    modules = (f"layers.0.self_attn.{name}_proj" for name in "qkv")
    assert products[0].description == " + ".join(modules)
    assert len(products) == 4 * 2 and all(len(each.nodes) == 1 for each in products)
