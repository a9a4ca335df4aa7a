"""What a graph returns beside its logits: every executor gives it, and steps that do not want it do not compute it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import llmc
from llmc.codegen.triton.lowering import lower_device
from llmc.engine_format import read_engine
from llmc.errors import EngineFormatError, PassError
from llmc.graph.execute import Chunk, sequence_inputs
from llmc.graph.interpreter import GraphInterpreter
from llmc.graph.model_graph import ModelGraph
from llmc.graph.verify import verify
from llmc.graph.weights import evaluate
from llmc.options import BuildOptions
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.program import Program, RowCount
from llmc.runtime.executors.executor import SideArray, SideOutputExecutor
from llmc.runtime.executors.opening import open_executor
from llmc.runtime.executors.opening_request import CacheRoom
from llmc.runtime.executors.side_outputs import SideOutputs
from llmc.runtime.loop.step import Step
from tests.codegen.tiny_models import llama
from tests.codegen.triton.device_harness import interpreter, step_arrays
from tests.conftest import DRAFT
from tests.gpu_target import gpu_target
from tests.tolerances import GPU_STEPS

TOKENS = [5, 9, 2, 33, 71, 12]
SIDES = ("hidden", "scaled")


def tap(graph: ModelGraph) -> None:
    """Return what logit rows are selected from, and those rows times three, which nobody else wants."""
    select, *_ = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.select_rows.default)
    with graph.graph.inserting_before(graph.graph.output_node()):
        scaled = graph.graph.call_function(torch.ops.aten.mul.Tensor, (select, 3.0))
    scaled.meta["val"] = select.meta["val"]
    graph.add_side_output("hidden", select.all_input_nodes[0])
    graph.add_side_output("scaled", scaled)


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    log.step("return hidden states")
    tap(graph)


def chunk_of(step: Step, rows: list[int], sides: tuple[str, ...]) -> Step:
    return replace(step, logit_rows=np.asarray(rows, np.int32), sides=sides)


@pytest.fixture(scope="module", params=["cpu", "reference", "onnxruntime"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped two-layer model with two side outputs."""
    path = tmp_path_factory.mktemp(request.param) / "tapped.llmc"
    passes = [*llmc.passes.default(), GraphPass("tap", run, Numerics.EXACT)]
    llmc.build(DRAFT, path, target=request.param, passes=passes, max_model_len=64)
    return path


def test_an_engine_leaves_what_its_graph_returns(engine: Path) -> None:
    directory = read_engine(engine)
    executor, blocks = open_executor(directory, CacheRoom(), 1)
    plain = chunk_of(step_arrays([Chunk(0, 0, tuple(TOKENS))], 16, 1), [1, 5], ())
    assert blocks and isinstance(executor, SideOutputExecutor)
    logits = executor.step(plain).copy()
    assert np.array_equal(executor.step(replace(plain, sides=SIDES)), logits), "to the last bit"
    hidden, scaled = (executor.side_output(name).copy() for name in SIDES)
    assert (hidden.shape, scaled.shape) == ((6, 128), (2, 128))
    assert np.isfinite(hidden).all() and np.abs(scaled).max() > 0.1
    executor.step(chunk_of(plain, [5], SIDES))
    assert np.array_equal(executor.side_output("scaled"), scaled[1:]), "rows follow logit_rows"
    executor.close()


def test_launches_for_a_side_output_run_only_in_steps_that_want_it(engine: Path) -> None:
    program = read_engine(engine).program
    assert [(side.name, side.rows) for side in program.side_outputs] == [
        ("hidden", RowCount.TOKENS),
        ("scaled", RowCount.LOGIT_ROWS),
    ]
    assert [launch.sides for launch in program.launches if launch.sides] == [("scaled",)] * bool(program.launches)
    for launch in program.launches:
        assert launch.runs(tokens=1, logit_rows=1) != bool(launch.sides)
        assert launch.runs(tokens=1, logit_rows=1, sides=("scaled",))


def test_interpreted_gpu_kernels_leave_them(tmp_path: Path) -> None:
    graph, source = llama()
    tap(graph)
    verify(graph)
    chunk = Chunk(0, 0, tuple(TOKENS))
    lowered = lower_device(graph, gpu_target("h100"), BuildOptions(max_model_len=64, max_batch_tokens=16))
    executor = interpreter(lowered, source, 1, tmp_path)
    step = step_arrays([chunk], lowered.program.limits.block_size, 1)
    logits = executor.step(step).copy()
    assert [launch.sides for launch in lowered.program.launches if launch.sides] == [("scaled",)]
    assert np.array_equal(executor.step(replace(step, sides=SIDES)), logits)
    for name, wanted in zip(SIDES, expected(graph, source), strict=True):
        error = np.linalg.norm(executor.side_output(name) - wanted) / np.linalg.norm(wanted)
        assert error < GPU_STEPS[torch.float32], name


def expected(graph: ModelGraph, source: object) -> list[SideArray]:
    """What the graph itself returns beside its logits."""
    (inputs,) = sequence_inputs(graph, TOKENS, chunk_sizes=[len(TOKENS)], block_size=16)
    weights = {node.name: evaluate(graph.weights[node.name], source) for node in graph.weight_nodes()}  # type: ignore[arg-type]
    return [value.float().numpy() for value in GraphInterpreter(graph.graph).outputs(inputs | weights)[1:]]


def test_names_and_tensors_have_to_agree() -> None:
    graph, _ = llama()
    tap(graph)
    graph.side_outputs = ("hidden",)
    with pytest.raises(PassError, match="returns 2 tensors after its logits and calls them hidden"):
        verify(graph)


def test_a_program_without_its_buffer_is_refused() -> None:
    graph, _ = llama()
    tap(graph)
    program = lower_device(graph, gpu_target("h100"), BuildOptions(max_model_len=64)).program
    SideOutputs(program)
    broken: Program = replace(program, buffers=())
    with pytest.raises(EngineFormatError, match="the side output 'hidden' does not fit the buffer"):
        SideOutputs(broken)
