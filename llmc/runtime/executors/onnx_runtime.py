"""Run an engine's ONNX model in onnxruntime, on its own kernels for CPUs or for CUDA devices.

On a CPU, onnxruntime's products sum up each element in the order of channels, for any number of rows (tests check
this), and attention adds zero for rows that a request lacks: bits depend only on the tokens before. The libraries of
devices sum up in another order when there is another number of rows. There steps run in tiles of a fixed number of
rows, as in the reference executor, and attention reads the blocks that a token's row requires.

The caches are tensors that a session reads and writes in place: each is bound as an input and as the output that
ScatterND makes of it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.engine_format import EngineDirectory
from llmc.engine_format.engine_kinds import MODEL_NAME
from llmc.errors import EngineFormatError, TargetError
from llmc.files.typed_json import REBUILD
from llmc.program import LOGITS, WRITTEN, Program, RowCount
from llmc.program.slot_views import move_slots, slot_views
from llmc.runtime.executors.block_copies import read_blocks, write_blocks
from llmc.runtime.executors.executor import Logits, SideArray
from llmc.runtime.executors.opening_request import OpeningRequest
from llmc.runtime.executors.reference_tiles import TILE, run_tiles, tiles_of
from llmc.runtime.executors.step_parts import parts_of
from llmc.runtime.loop.step import Ints, Step, input_names
from llmc.runtime.memory import Bytes

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def open_engine(request: OpeningRequest) -> "tuple[OnnxRuntimeExecutor, int]":
    """Open the engine with onnxruntime's kernels for CPUs."""
    return _opened(request, on_device=False)


def open_on_device(request: OpeningRequest) -> "tuple[OnnxRuntimeExecutor, int]":
    """Open the engine with onnxruntime's CUDA provider."""
    return _opened(request, on_device=True)


def _opened(request: OpeningRequest, *, on_device: bool) -> "tuple[OnnxRuntimeExecutor, int]":
    request.wait_for_weights()
    blocks, _ = request.in_host_memory()
    return OnnxRuntimeExecutor(request.directory, blocks, request.threads, on_device=on_device), blocks


class OnnxRuntimeExecutor:
    """A session over an engine's model, and a KV cache of `blocks` blocks. on_device: by the CUDA provider.

    Raises TargetError without the package or the provider.
    """

    def __init__(self, engine: EngineDirectory, blocks: int, threads: int, *, on_device: bool) -> None:
        self._program = program = engine.program
        if on_device and program.states:
            raise TargetError(
                "models with states run in onnxruntime on CPUs only",
                at="executor=onnxruntime_cuda",
                fix="leave it out, or run it by executor=onnxruntime",
            )
        self._session = _session(engine, threads, _CUDA if on_device else _CPU)
        self._in_tiles = on_device
        self._caches = _Caches(program, blocks, "cuda" if on_device else "cpu")
        # One extra block, for the writes of rows without a token.
        self._blocks, self._block_size = program.group_blocks(blocks), program.limits.block_size
        self._vocabulary = program.vocab_size
        self._sides, self._left = program.side_outputs, dict[str, SideArray]()
        inputs = [input_.name for input_ in self._session.get_inputs()]
        self._step_inputs = [name for name in inputs if name not in self._caches.values]
        unknown = sorted(set(self._step_inputs) - input_names(len(program.policies)))
        if unknown:
            raise EngineFormatError(
                f"the model needs the input {unknown[0]!r}, which is not a step input",
                at=engine.path / MODEL_NAME,
                fix=REBUILD,
            )
        self._binding: Any = self._session.io_binding()
        for name, value in self._caches.values.items():
            self._binding.bind_ortvalue_input(name, value)

    def step(self, step: Step) -> Logits:
        """Run a step, and return its logits. The model runs once per part of the step, or once per tile."""
        step = step.for_groups(self._blocks[1:])
        return self._step_in_tiles(step) if self._in_tiles else self._step_in_parts(step)

    def _step_in_parts(self, step: Step) -> Logits:
        logits = np.empty((len(step.logit_rows), self._vocabulary), np.float32)
        rows = {RowCount.TOKENS: len(step.input_ids), RowCount.LOGIT_ROWS: len(logits)}
        self._left.clear()
        for part in parts_of(step):
            part_logits, *others = self._run(part.step)
            logits[part.wanted] = part_logits
            for side, value in zip(self._sides, others, strict=True):
                whole = self._left.setdefault(side.name, np.empty((rows[side.rows], *side.shape), value.dtype))
                whole[part.wanted if side.rows is RowCount.LOGIT_ROWS else part.tokens] = value
        return logits

    def _step_in_tiles(self, step: Step) -> Logits:
        tiles = tiles_of(step, [count * self._block_size for count in self._blocks])
        logits, self._left = run_tiles(
            tiles, self._sides, lambda tile: self._run(self._with_own_blocks(tile.step, int(tile.tokens[0])))
        )
        return logits

    def _with_own_blocks(self, tile: Step, place: int) -> Step:
        """Return the step with the blocks up to the end of the tile, which depends only on its place in the sequence.
        place: the place of the first token in its tile."""
        rows = max(int(tile.context_lens[-1]), int(tile.context_lens[0]) - 1 - place + TILE)
        count = -(-rows // self._block_size)

        def padded(table: Ints, group: int) -> Ints:
            known = table[:, :count]
            return np.pad(known, ((0, 0), (0, count - known.shape[1])), constant_values=self._blocks[group])

        groups = None
        if tile.group_tables is not None:
            groups = np.stack([padded(table, group) for group, table in enumerate(tile.group_tables, 1)])
        return replace(tile, block_tables=padded(tile.block_tables, 0), group_tables=groups)

    def _run(self, step: Step) -> list[npt.NDArray[Any]]:
        """Logits and side outputs, in order."""
        arrays, binding = dict(step.inputs()), self._binding
        for name in self._step_inputs:
            binding.bind_cpu_input(name, np.ascontiguousarray(arrays[name]))
        binding.clear_binding_outputs()
        names = [LOGITS, *(side.name for side in self._sides)]
        for name in names:
            binding.bind_output(name)
        for name, value in self._caches.values.items():
            binding.bind_ortvalue_output(name + WRITTEN, value)
        self._session.run_with_iobinding(binding)
        return [value.numpy() for value in binding.get_outputs()[: len(names)]]

    def side_output(self, name: str) -> SideArray:
        return self._left[name]

    def copy_blocks(self, copies: Mapping[int, int], group: int = 0) -> None:
        with self._caches.changing(group) as arrays:
            for array in arrays:
                array[list(copies)] = array[list(copies.values())]

    def move_slots(self, sources: Ints, destinations: Ints, group: int = 0) -> None:
        with self._caches.changing(group) as arrays:
            memories = [array.view(np.uint8) for array in arrays]
            move_slots(slot_views(self._program, memories, group), sources, destinations)

    def read_blocks(self, blocks: Sequence[int], group: int = 0) -> Callable[[], Bytes]:
        """Copy the blocks at once; the function that is returned gives the copy."""
        copied = read_blocks(_whole_blocks(self._caches.fetched(group)), blocks)
        return lambda: copied

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Bytes], group: int = 0) -> None:
        with self._caches.changing(group) as arrays:
            write_blocks(_whole_blocks(arrays), blocks, contents)

    def copy_states(self, source: int, destination: int) -> None:
        """Copy a slot of every state."""
        for states in self._caches.states.values():
            states[destination] = states[source]

    def close(self) -> None:
        """Drop the session and the cache."""
        self._binding = self._session = None
        self._caches.values.clear()


class _Caches:
    """Keys and values of all layers, and states. values: as a session binds them, by the names of its inputs. states:
    as arrays.

    On a CPU their memory is that of NumPy's arrays; from a device they are fetched to be changed, and put back.
    """

    def __init__(self, program: Program, blocks: int, device: str) -> None:
        from onnxruntime import OrtValue

        self._program, self._is_host = program, device == "cpu"
        counts = program.group_blocks(blocks)
        self._arrays = {
            f"kv_cache_{layer}_{part}": np.zeros(
                (counts[cache.group] + 1, cache.kv_heads, program.limits.block_size, width), np.float32
            )
            for layer, cache in enumerate(program.caches)
            for part, width in zip("kv", cache.widths(), strict=True)
        }
        self.states = {
            f"state_{index}": np.zeros((program.limits.max_sequences, *state.shape), np.float32)
            for index, state in enumerate(program.states)
        }
        self.values: dict[str, Any] = {
            name: OrtValue.ortvalue_from_numpy(array, device, 0) for name, array in (self._arrays | self.states).items()
        }
        if not self._is_host:
            self._arrays.clear()

    @contextmanager
    def changing(self, group: int) -> Iterator[list[npt.NDArray[np.float32]]]:
        """A group's keys and values in the host's memory, until the end."""
        arrays = self.fetched(group)
        yield arrays
        if not self._is_host:
            for name, array in zip(self._names(group), arrays, strict=True):
                self.values[name].update_inplace(array)

    def fetched(self, group: int) -> list[npt.NDArray[np.float32]]:
        """A group's keys and values in the host's memory, to be read."""
        names = self._names(group)
        return [self._arrays[name] if self._is_host else self.values[name].numpy() for name in names]

    def _names(self, group: int) -> list[str]:
        return [f"kv_cache_{name.replace('.', '_')}" for name in self._program.caches_of(group)]


def _whole_blocks(arrays: Sequence[npt.NDArray[np.float32]]) -> list[Bytes]:
    return [array.reshape(len(array), -1).view(np.uint8) for array in arrays]


def _session(engine: EngineDirectory, threads: int, provider: str) -> Any:
    """Open a session and check that it has the provider; onnxruntime would continue without a missing one."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise TargetError(
            "an engine for onnxruntime needs the package onnxruntime, which is not installed",
            at=engine.path,
            fix="pip install 'llmc-compiler[onnx]'",
        ) from None
    available = onnxruntime.get_available_providers()
    if provider not in available:
        raise TargetError(
            f"this onnxruntime has no {provider}; it has {', '.join(available)}",
            at=engine.path,
            fix="pip install onnxruntime-gpu instead of onnxruntime, or run it on the CPU: executor=onnxruntime",
        )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # Errors only.
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(str(engine.path / MODEL_NAME), options, providers=[provider])
    except Exception as error:  # pybind raises no specific exception class for a model or a device.
        raise TargetError(f"onnxruntime does not open the model: {error}", at=engine.path, fix=REBUILD) from None
    if session.get_providers()[0] != provider:
        raise TargetError(
            f"the session runs on {session.get_providers()[0]}, not on {provider}",
            at=engine.path,
            fix="check the CUDA and cuDNN installation: onnxruntime's messages above name the missing parts",
        )
    session.disable_fallback()
    return session
