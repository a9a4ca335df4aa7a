"""Indexers are captured as llmc::choose_keys, one for each layer that has one."""

import torch

from llmc.graph.call_arguments import call_arguments
from llmc.graph.capture import capture
from llmc.options import BuildOptions
from tests.end_to_end.test_indexers import CHOSEN, sparse_model


def test_attention_sees_what_is_chosen() -> None:
    graph = capture(sparse_model("deepseek_v32"), BuildOptions()).graph
    found = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.attention.default)
    choices = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.choose_keys.default)
    assert len(found) == len(choices) == 2
    assert [call_arguments(node)["count"] for node in choices] == [CHOSEN] * 2
    assert all(call_arguments(node)["chosen"] is not None for node in found)
