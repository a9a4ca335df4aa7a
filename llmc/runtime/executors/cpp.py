"""Run a compiled CPU engine: a shared library, called once per step through the C interface of kernels/api.h."""

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int32, c_void_p

import numpy as np
import numpy.typing as npt

from llmc.engine_format import EngineDirectory
from llmc.engine_format.reader import check_target
from llmc.engine_format.weight_check import WeightCheck
from llmc.errors import EngineFormatError
from llmc.program import CHOICE_INPUTS, SideOutput, StepOutput
from llmc.program.engine_structs import LlmcBindings, LlmcChooseRows, LlmcRanks, LlmcStep
from llmc.program.program_interface import check_interface, interface_text
from llmc.program.slot_views import move_slots, slot_views
from llmc.runtime.adapters.adapter_memory import AdapterMemory
from llmc.runtime.adapters.placed_adapter import PlacedAdapter
from llmc.runtime.executors.block_copies import read_blocks, write_blocks
from llmc.runtime.executors.executor import Chosen, LaunchTime, Logits, SideArray
from llmc.runtime.executors.opening_request import OpeningRequest
from llmc.runtime.executors.side_outputs import SideOutputs
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.memory import Bytes, zeros
from llmc.runtime.sampling.row_choice import RowChoices

ENGINE_ABI = 4


def open_engine(request: OpeningRequest) -> "tuple[CppExecutor, int]":
    """Open a CPU engine. Raises TargetError if this machine lacks instructions."""
    directory = request.directory
    check_target(directory.path, directory.manifest.target)
    blocks, snapshots = request.in_host_memory()
    return open_cpp(directory, blocks, request.threads, request.check, snapshots), blocks


def open_cpp(
    engine: EngineDirectory, blocks: int, threads: int, check: WeightCheck | None = None, snapshots: int = 0
) -> "CppExecutor":
    """The executor for the library of an engine of one rank, which may be one that cannot choose tokens."""
    can_choose = hasattr(open_library(engine), "llmc_engine_choose")
    return (ChoosingCppExecutor if can_choose else CppExecutor)(engine, blocks, threads, check, snapshots=snapshots)


class CppExecutor:
    """The library with its weights (mapped from their files), KV cache of `blocks` blocks, arena and threads.

    check: the running check of the weights; no step's results are returned before it has ended. also: what else steps
    leave in the arena, for `side_output`. ranks: its place among others. snapshots: maximum number of snapshots of
    states. own_output: the array of the logits that `step` returns.
    """

    def __init__(
        self,
        engine: EngineDirectory,
        blocks: int,
        threads: int,
        check: WeightCheck | None = None,
        also: Sequence[SideOutput] = (),
        ranks: LlmcRanks | None = None,
        snapshots: int = 0,
    ) -> None:
        program = engine.program
        limits = program.limits
        self._executable, self._launches = engine.executable, len(program.launches)
        self._library = open_library(engine)
        self._check = check
        self._files = {t.path: np.frombuffer(engine.weight_file(t), np.uint8) for t in engine.tensors}
        self._blocks, self._state_slots = program.group_blocks(blocks), limits.max_sequences + snapshots
        self.snapshots = snapshots
        self._program = program
        self._caches: dict[str, Bytes] = {name: zeros(nbytes) for name, nbytes in program.memories(blocks).items()}
        self._states = [zeros(self._state_slots * state.nbytes) for state in program.states]
        self._arena = zeros(program.arena.at(tokens=limits.max_batch_tokens, logit_rows=limits.max_logit_rows))
        self._sides = SideOutputs(program, also)
        self.own_output: Logits = np.empty((limits.max_logit_rows, program.vocab_size), np.float32)
        # The engine keeps these two arrays of pointers, not a copy of them.
        self._weight_pointers = _pointers([_address(self._files[t.path]) + t.begin for t in engine.tensors])
        self._cache_pointers = _pointers([_address(cache) for cache in (*self._caches.values(), *self._states)])
        self._ranks = ranks
        place = None if ranks is None else ctypes.pointer(ranks)
        self._pools = None if program.adapters is None else AdapterMemory(program.adapters)
        self._pool_pointers = _pointers([] if self._pools is None else self._pools.addresses())
        bindings = LlmcBindings(
            self._weight_pointers, self._cache_pointers, _address(self._arena), threads, place, self._pool_pointers
        )
        self._engine: int | None = self._library.llmc_engine_open(ctypes.byref(bindings))
        if self._engine is None:
            raise EngineFormatError(
                f"the engine's library could not start with {threads} threads",
                at=engine.executable,
                fix="load it with fewer threads, or free some memory",
            )
        # Also when this object is forgotten instead of closed: the engine's threads would outlive it.
        self._close = weakref.finalize(self, self._library.llmc_engine_close, self._engine)

    def step(self, step: Step) -> Logits:
        """Run a step by one call into the library; ctypes releases the GIL during it."""
        self.run(step)
        self._end_check()
        return self.own_output[: len(step.logit_rows)]

    def run(self, step: Step, output: Logits | None = None, choices: LlmcChooseRows | None = None) -> None:
        """Run a step. output: memory for the logits of its rows, or for the rows that its tokens hand to the next
        stage; by default own_output. choices: for engines of several ranks, to choose tokens instead of returning
        logits."""
        output = self.own_output if output is None else output
        rows, step = len(step.logit_rows), step.for_groups(self._blocks[1:])
        # The arrays of all groups in order, as in codegen/cpp/step.py.
        slots = _joined(step.slot_mapping, step.group_slots)
        tables = _joined(step.block_tables, step.group_tables)
        lens = _joined(step.context_lens, step.group_lens)
        arguments = LlmcStep(
            len(step.input_ids),
            len(step.context_lens),
            rows,
            step.block_tables.shape[1],
            step.input_ids.ctypes.data,
            step.positions.ctypes.data,
            slots.ctypes.data,
            step.query_starts.ctypes.data,
            lens.ctypes.data,
            tables.ctypes.data,
            step.logit_rows.ctypes.data,
            step.tree_masks.ctypes.data,
            output.ctypes.data,
            self._sides.mask(step.sides),
            None if step.hidden is None else step.hidden.ctypes.data,
            None if step.adapter_of_token is None else step.adapter_of_token.ctypes.data,
            None if step.adapter_of_logit_row is None else step.adapter_of_logit_row.ctypes.data,
            None if step.state_slots is None else step.state_slots.ctypes.data,
            None,
        )
        if choices is None:
            self._library.llmc_engine_step(self._engine, ctypes.byref(arguments))
        else:
            self._library.llmc_engine_step_choosing(self._engine, ctypes.byref(arguments), ctypes.byref(choices))
        self._sides.note_step(len(step.input_ids), rows)

    def _end_check(self) -> None:
        if self._check is not None:
            self._check.wait()
            self._check = None

    def side_output(self, name: str) -> SideArray:
        return self._sides.array(name, self._arena[self._sides.place(name)])

    def step_timed(self, step: Step) -> tuple[LaunchTime, ...]:
        """Run a step as `step` does, and return the time of every launch by the library's own clock.

        Raises EngineFormatError for an engine of an older llmc, whose library does not measure.
        """
        if not hasattr(self._library, "llmc_engine_time_launches"):
            raise EngineFormatError(
                "the engine's library cannot time its launches: an older llmc made it",
                at=self._executable,
                fix="rebuild it: llmc build MODEL -o ENGINE",
            )
        times = np.zeros(self._launches + 1, np.int64)
        set_times = self._library.llmc_engine_time_launches
        set_times.restype, set_times.argtypes = None, (c_void_p, c_void_p)
        set_times(self._engine, times.ctypes.data)
        try:
            self.step(step)
        finally:
            set_times(self._engine, None)
        starts = (times - times[0]) / 1e9
        return tuple(LaunchTime(i, float(starts[i]), float(starts[i + 1])) for i in range(self._launches))

    def put_adapter(self, slot: int, adapter: PlacedAdapter) -> None:
        assert self._pools is not None, "the engine takes no adapters"
        self._pools.put(slot, adapter)

    def copy_blocks(self, copies: Mapping[int, int], group: int = 0) -> None:
        to, source = list(copies), list(copies.values())
        for blocks in self._whole_blocks(group):
            blocks[to] = blocks[source]

    def move_slots(self, sources: Ints, destinations: Ints, group: int = 0) -> None:
        memories = (self._caches[name] for name in self._program.caches_of(group))
        move_slots(slot_views(self._program, memories, group), sources, destinations)

    def compact(self, compaction: Ints) -> None:
        step = LlmcStep(compaction=compaction.ctypes.data)
        self._library.llmc_engine_step(self._engine, ctypes.byref(step))

    def read_blocks(self, blocks: Sequence[int], group: int = 0) -> Callable[[], Bytes]:
        """Copy the blocks at once; the function that is returned gives the copy."""
        copied = read_blocks(self._whole_blocks(group), blocks)
        return lambda: copied

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Bytes], group: int = 0) -> None:
        write_blocks(self._whole_blocks(group), blocks, contents)

    def _whole_blocks(self, group: int) -> list[Bytes]:
        return [self._caches[name].reshape(self._blocks[group], -1) for name in self._program.caches_of(group)]

    def copy_states(self, source: int, destination: int) -> None:
        for states in self._states:
            slots = states.reshape(self._state_slots, -1)
            slots[destination] = slots[source]

    def close(self) -> None:
        """Stop the engine's threads; its memory goes with this object."""
        if self._check is not None:
            self._check.cancel()
        self._close()


class ChoosingCppExecutor(CppExecutor):
    """Chooses tokens with the engine's threads too, many times faster than numpy would."""

    def __init__(
        self,
        engine: EngineDirectory,
        blocks: int,
        threads: int,
        check: WeightCheck | None = None,
        ranks: LlmcRanks | None = None,
        snapshots: int = 0,
    ) -> None:
        super().__init__(engine, blocks, threads, check, ranks=ranks, snapshots=snapshots)
        rows = engine.program.limits.max_logit_rows
        self._tokens, self._scores = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
        self._covered = np.ones(rows, np.bool_)
        self._library.llmc_engine_choose.restype = None
        self._library.llmc_engine_choose.argtypes = (c_void_p, POINTER(LlmcChooseRows))
        # Engines of several ranks that an older llmc made gather logits whole.
        self._chooses_across = hasattr(self._library, "llmc_engine_step_choosing")
        if self._chooses_across:
            across = self._library.llmc_engine_step_choosing
            across.restype, across.argtypes = None, (c_void_p, POINTER(LlmcStep), POINTER(LlmcChooseRows))

    def choose(self, step: Step, wanted: StepOutput, choices: RowChoices) -> Chosen:
        """Run a step and choose a token for each of its logit rows. Every row is covered."""
        rows = len(self.step(step))
        tokens = self.draw(self.own_output[:rows], choices)
        return Chosen(tokens, self._scores[:rows].copy(), self._covered[:rows])

    def draw(self, logits: Logits, choices: RowChoices) -> npt.NDArray[np.int32]:
        """Choose a token per row, for at most max_logit_rows rows, on the engine's threads."""
        arguments = self._rows(choices, logits.shape, logits.ctypes.data)
        self._library.llmc_engine_choose(self._engine, ctypes.byref(arguments))
        # The step's own tokens are read again after rows that the host changed are drawn.
        return self._tokens[: len(logits)].copy()

    def run_choosing(self, step: Step, choices: RowChoices) -> None:
        """Run a step on all ranks together that returns tokens and no logits."""
        self.run(step, self.own_output, self._rows(choices, (len(step.logit_rows), 0), None))

    def _rows(self, choices: RowChoices, shape: tuple[int, ...], logits: int | None) -> LlmcChooseRows:
        numbers = (getattr(choices, name).ctypes.data for name in CHOICE_INPUTS)
        return LlmcChooseRows(*shape, logits, *numbers, self._tokens.ctypes.data, self._scores.ctypes.data)

    def logits(self, first: int, count: int) -> Logits:
        """Return rows of the last step's logits, as a view."""
        return self.own_output[first : first + count]


def open_library(engine: EngineDirectory) -> ctypes.CDLL:
    """The engine's library with its functions declared. Raises EngineFormatError for one that cannot be used, or that
    was compiled for another program than the engine's."""
    path = engine.executable
    fix = "rebuild the engine on this machine: llmc build MODEL -o ENGINE"
    try:
        library = ctypes.CDLL(str(path.resolve()))
        library.llmc_engine_abi.restype = c_int32
        library.llmc_engine_interface.restype = c_char_p
        library.llmc_engine_open.restype = c_void_p
        library.llmc_engine_open.argtypes = (POINTER(LlmcBindings),)
        library.llmc_engine_step.restype = None
        library.llmc_engine_step.argtypes = (c_void_p, POINTER(LlmcStep))
        library.llmc_engine_close.restype = None
        library.llmc_engine_close.argtypes = (c_void_p,)
    except (OSError, AttributeError) as error:
        raise EngineFormatError(f"the engine's library cannot be loaded: {error}", at=path, fix=fix) from None
    abi = library.llmc_engine_abi()
    if abi != ENGINE_ABI:
        raise EngineFormatError(f"the library has interface {abi}, but this llmc needs {ENGINE_ABI}", at=path, fix=fix)
    compiled_for = library.llmc_engine_interface().decode(errors="replace")
    check_interface(interface_text(engine.program), compiled_for, path)
    return library


def _joined(of_first: Ints, of_groups: Ints | None) -> Ints:
    """An array of the first group of caches, followed by those of the others."""
    return of_first if of_groups is None else np.concatenate((of_first[None], of_groups))


def _address(array: Bytes) -> int:
    return int(array.ctypes.data)


def _pointers(addresses: list[int]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(addresses))(*addresses)
