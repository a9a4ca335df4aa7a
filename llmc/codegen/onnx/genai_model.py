"""A canonical graph's model as onnxruntime-genai runs it: rows of a batch, and a cache that attention itself keeps.

    llmc.attention(q, k, v)   ->   llmc.genai.attention(q, k, v, past key, past value, lengths, …), GroupQueryAttention
Products with codes and norms of sums are onnxruntime's own (contrib_ops.py). All else is as in the standard model: it
works on tokens, which are the concatenated rows of a batch. The inputs are input_ids, attention_mask and position_ids
[batch, tokens] and past_key_values.N.key and .value [batch, kv_heads, past, head_dim]; the outputs logits [batch,
tokens, vocabulary], and present.N.key and .value.
"""

import json
from collections.abc import Sequence
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import fx

from llmc.codegen.onnx.contrib_ops import CONTRIB, use_contrib_ops
from llmc.codegen.onnx.function_body import Body, Value
from llmc.codegen.onnx.types import OPSET
from llmc.codegen.origin import unsupported
from llmc.errors import LoweringError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.stage import Stage
from llmc.graph.verify import fallback_ops
from llmc.program import LOGITS

CONFIG_NAME = "genai_config.json"
_ATTENTION = torch.ops.llmc.attention.default
_DOMAIN = "llmc.genai"
# Internal names of the standard model's inputs and output.
_RENAMED = {"input_ids": "tokens", "positions": "token_positions", LOGITS: "token_logits"}


def make_genai_model(model: onnx.ModelProto, graph: ModelGraph) -> None:
    """Change the standard model of a canonical graph. Raises LoweringError for features that GroupQueryAttention
    lacks."""
    if graph.stage is not Stage.CANONICAL or graph.side_outputs:
        raise LoweringError(
            f"onnxruntime-genai keeps caches itself, and a {graph.stage.value} graph has its own",
            at=graph.info.name,
            fix="export stage canonical",
        )
    layers = attention_layers(graph)
    use_contrib_ops(model, graph)
    nodes = [*_prologue(), *(_renamed(node) for node in model.graph.node)]
    for layer, node in enumerate(layers):
        place = next(i for i, candidate in enumerate(nodes) if candidate.name == node.name)
        function = _attention(node)
        function.overload = str(layer)
        model.functions.append(function)
        past = [_cache("past_key_values", layer, part) for part in ("key", "value")]
        present = [_cache("present", layer, part) for part in ("key", "value")]
        shared = ["seqlens_k", "total_sequence_length", "rows"]
        nodes[place] = helper.make_node(
            "attention",
            [*nodes[place].input, *past, *shared],
            [*nodes[place].output, *present],
            name=node.name,
            domain=_DOMAIN,
            overload=function.overload,
        )
    nodes.append(helper.make_node("Concat", ["rows", "any_size"], ["logits_shape"], axis=0))
    nodes.append(helper.make_node("Reshape", [_RENAMED[LOGITS], "logits_shape"], [LOGITS]))
    for field, values in (
        (model.graph.node, nodes),
        (model.graph.input, _inputs(layers)),
        (model.graph.output, _outputs(layers, graph.info.vocab_size)),
    ):
        del field[:]
        field.extend(values)
    del model.graph.value_info[:]
    for domain in (_DOMAIN, CONTRIB):
        model.opset_import.append(helper.make_opsetid(domain, 1))


def attention_layers(graph: ModelGraph) -> list[fx.Node]:
    """The attentions, in order. Raises LoweringError for layers whose heads differ, which no config can say."""
    layers = list(graph.graph.find_nodes(op="call_function", target=_ATTENTION))
    shapes = [[argument.meta["val"].shape[1:] for argument in node.args[:3]] for node in layers]
    for node, (q, k, v) in zip(layers, shapes, strict=True):
        if k != v or q[1] != k[1] or [q, k, v] != shapes[0]:
            heads = f"query, key and value heads are {list(q)}, {list(k)}, {list(v)}"
            raise unsupported(node, f"{heads}: GroupQueryAttention has one size", "export the standard model")
    states = next((node for node in graph.graph.nodes if node.target in fallback_ops(("states",))), None)
    if states is not None:
        raise unsupported(states, "onnxruntime-genai keeps no state for it", "export the standard model")
    if not layers:
        raise LoweringError("the graph has no llmc::attention", at=graph.info.name, fix="export the standard model")
    return layers


def genai_config(graph: ModelGraph) -> str:
    """genai_config.json: names, sizes and what greedy search needs."""
    layers = attention_layers(graph)
    arguments = call_arguments(layers[0])
    q, k = (arguments[name].meta["val"] for name in ("q", "k"))
    info = graph.info
    end = list(info.eos_token_ids) or [0]
    length = info.max_positions or 4096
    decoder = {
        "session_options": {"provider_options": []},
        "filename": "model.onnx",
        "head_size": int(q.shape[2]),
        "hidden_size": int(q.shape[1] * q.shape[2]),
        "num_attention_heads": int(q.shape[1]),
        "num_key_value_heads": int(k.shape[1]),
        "num_hidden_layers": len(layers),
        "inputs": {
            **{name: name for name in ("input_ids", "attention_mask", "position_ids")},
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": LOGITS,
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    model = {
        "type": "llama",  # It does the same for all decoders with these inputs.
        "vocab_size": info.vocab_size,
        "context_length": length,
        "bos_token_id": end[0] if info.bos_token_id is None else info.bos_token_id,
        "eos_token_id": end,
        "pad_token_id": end[0],
        "decoder": decoder,
    }
    search = {"do_sample": False, "max_length": length, "past_present_share_buffer": True}
    return json.dumps({"model": model, "search": search}, indent=1) + "\n"


def _attention(node: fx.Node) -> onnx.FunctionProto:
    """GroupQueryAttention over token-major q, k and v, without rotation: the graph has done that."""
    b, arguments = Body(), call_arguments(node)
    q, k, v = (Value(name, arguments[name].meta["val"]) for name in ("q", "k", "v"))
    sinks = None if arguments["sinks"] is None else "sinks"
    rows = [b("Reshape", x, b("Concat", "rows", b.integers([x.size(1) * x.size(2)]), axis=0)) for x in (q, k, v)]
    wanted: dict[str, Any] = {"num_heads": q.size(1), "kv_num_heads": k.size(1), "scale": arguments["scale"]}
    if arguments["window"] is not None:
        wanted["local_window_size"] = arguments["window"]
    if arguments["softcap"] is not None:
        wanted["softcap"] = arguments["softcap"]
    lengths = ("seqlens_k", "total_sequence_length")
    out, *present = b.several(
        "GroupQueryAttention",
        3,
        *rows,
        "past_key",
        "past_value",
        *lengths,
        *([None] * 4 + [sinks] if sinks else []),
        domain=CONTRIB,
        **wanted,
    )
    names = ["q", "k", "v", *([sinks] if sinks else []), "past_key", "past_value", *lengths, "rows"]
    results = [b.reshape(out, -1, q.size(1), q.size(2)), *present]
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_function(_DOMAIN, "attention", names, results, b.nodes, opsets)


def _cache(kind: str, layer: int, part: str) -> str:
    return f"{kind}.{layer}.{part}"


def _renamed(node: onnx.NodeProto) -> onnx.NodeProto:
    """The node with its inner names replaced."""
    for names in (node.input, node.output):
        for i, name in enumerate(names):
            names[i] = _RENAMED.get(name, name)
    return node


def _prologue() -> list[onnx.NodeProto]:
    """Tokens and positions of all rows, and how long each row is."""

    def integers(name: str, values: Sequence[int]) -> onnx.NodeProto:
        tensor = helper.make_tensor("", TensorProto.INT64, [len(values)], values)
        return helper.make_node("Constant", [], [name], value=tensor)

    return [
        integers("any_size", [-1]),
        integers("one", [1]),
        helper.make_node("Shape", ["input_ids"], ["rows"]),
        helper.make_node("Reshape", ["input_ids", "any_size"], [_RENAMED["input_ids"]]),
        helper.make_node("Reshape", ["position_ids", "any_size"], [_RENAMED["positions"]]),
        helper.make_node("ReduceSum", ["attention_mask", "one"], ["lengths"], keepdims=0),
        helper.make_node("Sub", ["lengths", "one"], ["last_places"]),
        helper.make_node("Cast", ["last_places"], ["seqlens_k"], to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["total_length"], start=1, end=2),
        helper.make_node("Squeeze", ["total_length"], ["total"]),
        helper.make_node("Cast", ["total"], ["total_sequence_length"], to=TensorProto.INT32),
    ]


def _inputs(layers: Sequence[fx.Node]) -> list[onnx.ValueInfoProto]:
    shapes = {"input_ids": "sequence", "attention_mask": "total", "position_ids": "sequence"}
    infos = [helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", size]) for n, size in shapes.items()]
    return infos + _cache_infos("past_key_values", layers, "past")


def _outputs(layers: Sequence[fx.Node], vocabulary: int) -> list[onnx.ValueInfoProto]:
    logits = helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["batch", "sequence", vocabulary])
    return [logits, *_cache_infos("present", layers, "total")]


def _cache_infos(kind: str, layers: Sequence[fx.Node], length: str) -> list[onnx.ValueInfoProto]:
    k: Any = layers[0].args[1]
    heads, channels = (int(size) for size in k.meta["val"].shape[1:])
    return [
        helper.make_tensor_value_info(_cache(kind, layer, part), TensorProto.FLOAT, ["batch", heads, length, channels])
        for layer in range(len(layers))
        for part in ("key", "value")
    ]
