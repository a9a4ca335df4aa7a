"""Models whose indexer chooses keys are captured for contexts of which it chooses all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmc.architectures.tiny_config import tiny_config
from llmc.errors import CaptureError
from llmc.graph.capture import capture
from llmc.options import BuildOptions


def deepseek_v32(index_topk: int) -> Any:
    from transformers import AutoModelForCausalLM

    config = tiny_config("deepseek_v32")
    config.index_topk, config.num_hidden_layers = index_topk, 1
    made: Any = AutoModelForCausalLM
    return made.from_config(config)


def test_the_context_is_bounded_by_what_is_chosen() -> None:
    graph = capture(deepseek_v32(40), BuildOptions()).graph
    assert graph.info.max_positions is not None and graph.info.max_positions <= 40
    (attention,) = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.attention.default)
    assert len(attention.args) == 4


def test_one_that_chooses_fewer_than_any_step_may_have_is_refused() -> None:
    with pytest.raises(CaptureError, match="of layer 0 lets each query see 5 keys, which its indexer chooses"):
        capture(deepseek_v32(5), BuildOptions())
