"""Run an engine's graph eagerly in torch: slow and right, for machines without a compiler and as an oracle.

A library's matrix product sums up a row in another order when it has another number of rows, or when the row is at
another place among them. So the graph runs on tiles of TILE rows, always: a token's place in its tile is its position
modulo TILE, rows without a token of the step are ignored, and a row sees others only through the cache. Its
bits then depend only on the tokens before it. All ranks of a partitioned graph run here, op by op
(llmc/graph/ranks.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

import llmc.ops  # noqa: F401  (registers the ops that the graph calls)
from llmc.engine_format import EngineDirectory
from llmc.engine_format.engine_kinds import GRAPH_NAME
from llmc.engine_format.reader import of_rank
from llmc.errors import EngineFormatError
from llmc.graph.dtype_names import TORCH_DTYPES
from llmc.graph.interpreter import GraphInterpreter
from llmc.graph.ranks import on_ranks
from llmc.graph.serialize import deserialize_graph, read_memory_text, read_weight_table
from llmc.program import COMPACTION, Program
from llmc.program.program_interface import check_interface, memory_text
from llmc.program.slot_views import move_slots, slot_views
from llmc.runtime.executors.block_copies import read_blocks, write_blocks
from llmc.runtime.executors.executor import Logits, SideArray
from llmc.runtime.executors.opening_request import OpeningRequest
from llmc.runtime.executors.reference_tiles import Tile, run_tiles, texts_of, tiles_of
from llmc.runtime.executors.stored_weights import graph_weights
from llmc.runtime.loop.step import Ints, Step, input_names
from llmc.runtime.memory import Bytes


def open_engine(request: OpeningRequest) -> "tuple[ReferenceExecutor, int]":
    """Open the engine in this machine's memory."""
    request.wait_for_weights()
    blocks, snapshots = request.in_host_memory()
    return ReferenceExecutor(request.directory, blocks, snapshots), blocks


class ReferenceExecutor:
    """The graph of graph.json with its weights and a KV cache of `blocks` blocks, on each rank its own. snapshots: how
    many of states there may be."""

    def __init__(self, engine: EngineDirectory, blocks: int, snapshots: int = 0) -> None:
        program = engine.program
        path = engine.path / GRAPH_NAME
        text = engine.files.text(GRAPH_NAME)
        graph = deserialize_graph(text, path)
        check_interface(memory_text(program), read_memory_text(text), path)
        head = engine.manifest.model.head
        self._tiles: Callable[[Step], Iterator[Tile]] = (
            texts_of if head is not None and head.whole_texts else lambda step: tiles_of(step, self._spare_slots)
        )
        table = read_weight_table(text, path)
        self._ranks = [
            graph_weights(of_rank(engine, rank), table) | _caches(program, blocks) | _states(program, snapshots)
            for rank in range(program.ranks)
        ]
        self._program, self._blocks = program, program.group_blocks(blocks)
        # One extra block, for the writes of rows without a token.
        self._spare_slots = tuple(count * program.limits.block_size for count in self._blocks)
        self._tensors, self._states = on_ranks(self._ranks), tuple(_states(program, 0))
        self.snapshots = snapshots
        self._interpreter = GraphInterpreter(graph)
        self._sides, self._left = program.side_outputs, dict[str, SideArray]()
        self._step_inputs = [n.name for n in graph.find_nodes(op="placeholder") if n.name not in self._tensors]
        unknown = sorted(set(self._step_inputs) - input_names(len(program.policies)) - {COMPACTION})
        if unknown:
            raise EngineFormatError(
                f"the graph needs the input {unknown[0]!r}, which is neither a weight nor a step input",
                at=path,
                fix="rebuild the engine: llmc build MODEL --target reference -o ENGINE",
            )

    def step(self, step: Step) -> Logits:
        """Run tile by tile, node by node, in inference mode."""
        tiles = self._tiles(step.for_groups(self._blocks[1:]))
        logits, self._left = run_tiles(tiles, self._sides, self._run)
        return logits

    def _run(self, tile: Tile) -> list[SideArray]:
        arrays = dict(tile.step.inputs())
        inputs = {name: torch.from_numpy(arrays[name]) for name in self._step_inputs if name in arrays}
        if COMPACTION in self._step_inputs:
            inputs[COMPACTION] = torch.zeros(0, dtype=torch.int32)
        # Side outputs are always computed, so that a step has the same products.
        outputs = self._interpreter.outputs(self._tensors | inputs)
        return [(output.float() if output.is_floating_point() else output).numpy() for output in outputs]

    def side_output(self, name: str) -> SideArray:
        return self._left[name]

    def copy_blocks(self, copies: Mapping[int, int], group: int = 0) -> None:
        for tensors in self._ranks:
            for tensor in self._caches_of(tensors, group):
                tensor[list(copies)] = tensor[list(copies.values())]

    def move_slots(self, sources: Ints, destinations: Ints, group: int = 0) -> None:
        for tensors in self._ranks:
            memories = [tensor.view(torch.uint8) for tensor in self._caches_of(tensors, group)]
            slots = slot_views(self._program, memories, group)
            move_slots(slots, torch.from_numpy(sources).long(), torch.from_numpy(destinations).long())

    def read_blocks(self, blocks: Sequence[int], group: int = 0) -> Callable[[], Bytes]:
        """Copy the blocks of all ranks at once; the function that is returned gives the copy."""
        copied = read_blocks(self._whole_blocks(group), blocks)
        return lambda: copied

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Bytes], group: int = 0) -> None:
        write_blocks(self._whole_blocks(group), blocks, contents)

    def _whole_blocks(self, group: int) -> list[Bytes]:
        held = (tensor for tensors in self._ranks for tensor in self._caches_of(tensors, group))
        return [tensor.view(torch.uint8).reshape(len(tensor), -1).numpy() for tensor in held]

    def _caches_of(self, tensors: Mapping[str, Tensor], group: int) -> list[Tensor]:
        return [tensors[f"kv_cache_{name.replace('.', '_')}"] for name in self._program.caches_of(group)]

    def compact(self, compaction: Ints) -> None:
        self._interpreter.run_readers(COMPACTION, self._tensors | {COMPACTION: torch.from_numpy(compaction)})

    def copy_states(self, source: int, destination: int) -> None:
        for tensors in self._ranks:
            for name in self._states:
                tensors[name][destination] = tensors[name][source]

    def close(self) -> None:
        """Drop the weights and the cache."""
        self._tensors.clear()
        self._ranks.clear()


def _caches(program: Program, blocks: int) -> dict[str, Tensor]:
    """The caches of one rank by placeholder, all zero, with one extra block."""
    size, counts = program.limits.block_size, program.group_blocks(blocks)
    return {
        f"kv_cache_{layer}_{part}": torch.zeros(
            (counts[cache.group] + 1, cache.kv_heads, size, width), dtype=TORCH_DTYPES[cache.dtype]
        )
        for layer, cache in enumerate(program.caches)
        for part, width in zip("kv", cache.widths(), strict=True)
    }


def _states(program: Program, snapshots: int) -> dict[str, Tensor]:
    """Return the states by placeholder, with a slot for each sequence and for each snapshot."""
    slots = program.limits.max_sequences + snapshots
    return {f"state_{index}": torch.zeros((slots, *state.shape)) for index, state in enumerate(program.states)}
