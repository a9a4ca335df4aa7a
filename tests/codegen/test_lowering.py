"""What lowering decides: kernels, layouts, sharing of memory, where logits go; and what it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from llmc.codegen.backend import KernelCall
from llmc.codegen.call import Call
from llmc.codegen.cpp.backend import CppBackend
from llmc.codegen.cpp.lowering import Lowered, lower
from llmc.codegen.lowering import plan_step
from llmc.errors import LlmcError, LoweringError
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.prediction.cost_expression import evaluate_expression
from llmc.prediction.step_shape import StepShape
from llmc.program import Layout, RowCount
from llmc.program.launch_arguments import Count, Operand
from llmc.targets import host_target
from tests.codegen.tiny_models import CHANNELS, VOCABULARY, GraphBuilder, aten, gemma2, gpt2, llama, ops


def lowered(graph: ModelGraph) -> Lowered:
    return lower(graph, host_target(), BuildOptions())


def start(dtype: torch.dtype = torch.float32) -> tuple[GraphBuilder, fx.Node]:
    b = GraphBuilder(dtype)
    return b, b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("embed", VOCABULARY, CHANNELS))


def finish(b: GraphBuilder, x: fx.Node) -> ModelGraph:
    return b.finish(b.call(ops.select_rows.default, x, b.inputs["logit_rows"]))[0]


def test_llama_needs_no_loops() -> None:
    kernels = Counter(launch.kernel for launch in lowered(llama()[0]).program.launches)
    assert kernels == {
        "llmc_embedding_panels_f32": 1,
        "llmc_rope_angles": 1,
        "llmc_rms_norm_f32": 5,
        "llmc_linear_f32": 6,
        "llmc_kv_write_f32_f32": 2,
        "llmc_paged_attention_f32_f32": 2,
        "llmc_gated_linear_f32": 2,
        "llmc_select_rows_f32": 1,
        "llmc_lm_head_f32": 1,
    }


def test_a_tied_table_is_stored_once_in_panels() -> None:
    slots = {slot.name: slot for slot in lowered(llama()[0]).program.weights}
    assert slots["embed"].layout is Layout.PANELS
    assert slots["gate_up_0"].layout is Layout.GATED_PANELS
    assert slots["norm_0"].layout is Layout.VECTOR_F32
    assert len(slots) == 3 + 2 * 6


def test_an_untied_table_is_stored_in_rows() -> None:
    slots = {slot.name: slot.layout for slot in lowered(gpt2()[0]).program.weights}
    assert (slots["wte"], slots["head"]) == (Layout.ROWS, Layout.PANELS)


def test_a_weight_read_in_two_ways_has_two_slots() -> None:
    b, x = start()
    square = b.weight("square", CHANNELS, CHANNELS)
    y = b.call(ops.linear.default, x, square)
    scaled = b.call(aten.mul.Tensor, y, b.call(aten.sum.dim_IntList, square, [-1]))
    result = lowered(finish(b, scaled))
    assert {(s.name, s.layout) for s in result.program.weights} == {
        ("embed", Layout.ROWS),
        ("square", Layout.PANELS),
        ("square.rows", Layout.ROWS),
    }
    assert len(result.recipes) == len(result.program.weights)


def test_bf16_vectors_are_widened() -> None:
    slots = {slot.name: slot for slot in lowered(llama(torch.bfloat16)[0]).program.weights}
    assert (slots["norm_0"].dtype, slots["norm_0"].nbytes) == ("F32", CHANNELS * 4)
    assert slots["qkv_0"].dtype == "BF16"


def test_heads_are_rotated_in_place() -> None:
    launches = lowered(llama()[0]).program.launches
    write = next(x for x in launches if x.family == "kv_write")
    q, q_out, k = (write.arguments[name] for name in ("q", "q_out", "k"))
    assert q == q_out == Operand("buffer", "linear_default", stride=96)
    assert k == Operand("buffer", "linear_default", 48, 96)


def test_the_last_loop_works_on_the_logits_in_place() -> None:
    *_, head, cap = lowered(gemma2()[0]).program.launches
    assert head.arguments["y"] == Operand("output", "logits", stride=VOCABULARY)
    assert cap.arguments == {"rows": Count.LOGIT_ROWS, "p0": Operand("output", "logits")}


def test_logits_of_another_dtype_are_copied() -> None:
    b, x = start(torch.bfloat16)
    *_, copy = lowered(finish(b, x)).program.launches
    source = Operand("buffer", "select_rows_default")
    assert copy.arguments == {"rows": Count.LOGIT_ROWS, "p0": source, "p1": Operand("output", "logits")}


def test_a_value_that_is_read_later_is_not_overwritten() -> None:
    b, x = start()
    y = b.call(aten.tanh.default, b.call(ops.linear.default, x, b.weight("w", CHANNELS, CHANNELS)))
    z = b.call(ops.linear.default, y, b.weight("v", CHANNELS, CHANNELS))
    launches = lowered(finish(b, b.call(aten.add.Tensor, z, x))).program.launches
    tanh = next(x for x in launches if "tanh" in x.kernel)
    add = next(x for x in launches if "add" in x.kernel)
    assert len(tanh.arguments) == 2, "tanh replaces the product's result"
    assert len(add.arguments) == 3, "one of the two terms is replaced"


def test_the_arena_is_shared() -> None:
    program = lowered(llama()[0]).program
    assert program.arena.tokens < program.unplanned_arena.tokens / 3
    rows = {buffer.rows for buffer in program.buffers}
    assert rows == {RowCount.TOKENS, RowCount.LOGIT_ROWS}


def test_buffers_span_their_launches() -> None:
    program = lowered(gemma2()[0]).program
    for buffer in program.buffers:
        used = [
            i
            for i, launch in enumerate(program.launches)
            for a in launch.arguments.values()
            if isinstance(a, Operand) and a.name == buffer.name
        ]
        assert (buffer.first_launch, buffer.last_launch) == (min(used), max(used))


@pytest.mark.parametrize("model", [llama, gpt2, gemma2], ids=lambda m: m.__name__)
def test_costs_can_be_evaluated(model: Callable[[], tuple[ModelGraph, object]]) -> None:
    small, large = StepShape.decode(1, 8).values(), StepShape.prefill(64).values()
    for launch in lowered(model()[0]).program.launches:
        assert 0 < evaluate_expression(launch.bytes_moved, small) < evaluate_expression(launch.bytes_moved, large) or (
            "L" in launch.bytes_moved
        )
        assert evaluate_expression(launch.flops, small) <= evaluate_expression(launch.flops, large)


def test_a_fixed_length_is_refused() -> None:
    graph, _ = gemma2()
    positions = next(n for n in graph.inputs() if n.name == "positions")
    positions.meta["val"] = torch.zeros(5, dtype=torch.int32)
    with pytest.raises(LoweringError, match="its length is fixed to 5"):
        lowered(graph)


def test_launches_say_where_they_come_from() -> None:
    graph, _ = gemma2()
    tanh = next(n for n in graph.graph.nodes if n.target is aten.tanh.default)
    tanh.meta["rewrite"] = "#12 fuse_softcap"
    result = lowered(graph)
    origin = result.program.launches[-1].origin
    assert origin.rewrite == "#12 fuse_softcap"
    assert origin.source == "tiny/model.py:7 in forward: logits = torch.tanh(logits / 3)"
    assert "// tiny/model.py:7 in forward: logits = torch.tanh(logits / 3)" in result.source


Break = Callable[[GraphBuilder, fx.Node], fx.Node]


def _unknown_op(b: GraphBuilder, x: fx.Node) -> fx.Node:
    return b.call(aten.cumsum.default, x, -1, source="y = x.cumsum(-1)")


def _reduced_tokens(b: GraphBuilder, x: fx.Node) -> fx.Node:
    return b.call(aten.sub.Tensor, x, b.call(aten.mean.dim, x, [0], True, source="m = x.mean(0)"))


def _joined_tokens(b: GraphBuilder, x: fx.Node) -> fx.Node:
    return b.call(aten.cat.default, [x, x], 0, source="y = torch.cat([x, x])")


def _computed_weight(b: GraphBuilder, x: fx.Node) -> fx.Node:
    weight = b.call(aten.mul.Tensor, b.weight("w", CHANNELS, CHANNELS), 2.0)
    return b.call(ops.linear.default, x, weight, source="y = F.linear(x, 2 * w)")


def _half(b: GraphBuilder, x: fx.Node) -> fx.Node:
    return b.call(aten._to_copy.default, x, dtype=torch.float16, source="y = x.half()")


@pytest.mark.parametrize(
    ("change", "operation", "problem", "line"),
    [
        (_unknown_op, "aten.cumsum.default", "no kernel", "y = x.cumsum(-1)"),
        (_reduced_tokens, "aten.mean.dim", "reduces", "m = x.mean(0)"),
        (_joined_tokens, "aten.cat.default", "token", "y = torch.cat([x, x])"),
        (_computed_weight, "llmc.linear.default", "its weight is computed in the step", "y = F.linear(x, 2 * w)"),
        (_half, "aten._to_copy.default", "torch.float16", "y = x.half()"),
    ],
)
def test_what_cannot_be_lowered(change: Break, operation: str, problem: str, line: str) -> None:
    b, x = start()
    graph = finish(b, change(b, x))
    with pytest.raises(LoweringError) as caught:
        lowered(graph)
    assert operation in caught.value.problem
    assert problem in caught.value.problem
    assert caught.value.at is not None and line in caught.value.at and "model.py:7" in caught.value.at
    assert caught.value.fix


def test_narrower_activations_than_weights_are_refused() -> None:
    b, x = start(torch.bfloat16)
    graph = finish(b, b.call(ops.linear.default, x, b.weight("w", CHANNELS, CHANNELS, dtype=torch.float32)))
    with pytest.raises(LlmcError, match=r"the weight is torch.float32 but x is torch.bfloat16"):
        lowered(graph)


class _AsksForMemory(CppBackend):
    """Before its operand that has to be copied, a norm asks for memory of the same shape, again and again."""

    def calls(self, node: fx.Node, call: Call) -> tuple[tuple[KernelCall, ...], ...]:
        if node.target is ops.rms_norm.default:
            self.own = [call.workspace(f"own{i}", Count.TOKENS, CHANNELS // 2, torch.float32) for i in range(9)]
            self.copied = call.rows("x")
        ((first, *_), *_) = super().calls(node, call)
        if node.target is not ops.rms_norm.default:
            return ((first,),)
        return ((replace(first, arguments={**first.arguments, **{f"own{i}": o for i, o in enumerate(self.own)}}),),)


def test_copies_and_memory_of_one_node_are_told_apart() -> None:
    b, x = start()
    half = b.call(aten.slice.Tensor, x, 1, 0, CHANNELS, 2)
    normed = b.call(ops.rms_norm.default, half, None, 1e-6)
    backend = _AsksForMemory(host_target())
    graph = finish(b, b.call(ops.lm_head.default, normed, b.weight("head", VOCABULARY, CHANNELS // 2)))
    program = plan_step(graph, backend, BuildOptions()).program
    assert backend.copied is not None
    names = {operand.name for operand in (*backend.own, backend.copied)}
    assert len(names) == 10 and names <= {buffer.name for buffer in program.buffers}
