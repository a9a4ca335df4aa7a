"""A program's launches on a device, prepared once, so that queueing one costs little more than the driver's call."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from llmc.program import DeviceBinary, StepOutput
from llmc.runtime.device.argument_table import ArgumentTable
from llmc.runtime.device.arguments import scratch_bytes
from llmc.runtime.device.call_selection import CallSelection, Grid
from llmc.runtime.device.inputs import StepShape
from llmc.runtime.device.program import PlannedCall
from llmc.runtime.executors.cuda_driver import LoadedKernel
from llmc.runtime.executors.library_calls import DeviceTensors, LibraryCall, Views, library_call


class CudaLaunches:
    """The launches of `calls`, with the values of their arguments in one table.

    kernels: by name, for the calls that are not a library's. addresses: where the memory (space, name) starts, except
    inputs whose place depends on the step. tensors: the same memory, with the inputs. scratch: returns the address of
    scratch memory of a size in bytes, which all launches share because they run sequentially.
    """

    def __init__(
        self,
        calls: Sequence[PlannedCall],
        kernels: Mapping[str, LoadedKernel],
        addresses: Mapping[tuple[str, str], int],
        tensors: DeviceTensors,
        scratch: Callable[[int], int],
    ) -> None:
        self.calls = calls
        self._inputs, self._scratch = tensors.inputs.data_ptr(), scratch
        self._selection = CallSelection(calls)
        own = {i: kernels[call.kernel.name] for i, call in enumerate(calls) if not call.kernel.is_library}
        self._table = ArgumentTable([(calls[i], kernel.binary) for i, kernel in own.items()], addresses)
        addresses_of = dict(zip(own, self._table.addresses, strict=True))
        self._own = {i: (kernel.launch, addresses_of[i]) for i, kernel in own.items()}
        self._library: dict[int, LibraryCall] = {
            i: library_call(call, tensors) for i, call in enumerate(calls) if call.kernel.is_library
        }
        self._views: Views = {}
        # Only few launches use scratch memory: by call, which binary it is.
        with_scratch = {kernel.binary.file: kernel.binary for kernel in own.values() if kernel.binary.scratch_bytes}
        self._binaries: Mapping[str, DeviceBinary] = with_scratch
        self._scratch_users = {i: kernel.binary.file for i, kernel in own.items() if kernel.binary.scratch_bytes}

    def prepare(self, shape: StepShape, wanted: StepOutput, sides: Collection[str]) -> list[tuple[int, Grid]]:
        """The indices of a step's calls, with their grids. Computes the arguments, which hold until the next one is
        prepared."""
        calls = self._selection.of_step(shape.counts(), wanted, sides)
        users = self._scratch_users
        sizes = {(users[index], grid) for index, grid in calls if index in users} if users else ()
        most = max((scratch_bytes(self._binaries[file], grid) for file, grid in sizes), default=0)
        self._table.fill(shape, self._inputs, self._scratch(most))
        self._views.clear()
        return calls

    def queue(self, prepared: Iterable[tuple[int, Grid]], shape: StepShape, stream: int) -> None:
        """Launch prepared calls: kernels on `stream`, a library's on torch's current stream, which must be that one."""
        own, library, views = self._own, self._library, self._views
        for index, grid in prepared:
            if index in own:
                launch, arguments = own[index]
                launch(grid, stream, arguments)
            else:
                library[index](shape, views)
