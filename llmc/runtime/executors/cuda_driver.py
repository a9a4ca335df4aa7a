"""The few calls of the CUDA driver that load and launch compiled kernels, in the context that torch has made."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc.errors import EngineFormatError, TargetError, ToolchainError
from llmc.files.regular_file import read_regular
from llmc.program import DeviceBinary

# Above this many bytes of shared memory a block, a kernel has to request it.
_PLAIN_SHARED_BYTES = 48 * 1024
_MOST_BINARY_BYTES = 256 << 20
_MOST_CONFIGURATIONS = 1024
_NEWER_DRIVER = ("CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION")


def driver() -> Any:
    """The module cuda.bindings.driver. Raises ToolchainError if it is not installed."""
    try:
        from cuda.bindings import driver as module
    except ImportError:
        raise ToolchainError(
            "the package cuda-bindings, which launches the engine's kernels, is not installed",
            fix="pip install 'llmc-compiler[gpu]'",
        ) from None
    return module


@dataclass(frozen=True)
class LoadedKernel:
    """A function on the device. driver: the bindings' module; module keeps the function loaded."""

    driver: Any
    module: Any
    function: Any
    binary: DeviceBinary
    # By grid and stream, for launches that begin before the one ahead of them has ended: costly to make.
    _configurations: dict[tuple[tuple[int, int, int], int], Any] = field(default_factory=dict, compare=False)

    def launch(self, grid: tuple[int, int, int], stream: int, arguments: int) -> None:
        """Queue it on a stream. arguments: address of the array of pointers to their values."""
        if self.binary.is_dependent:
            result = self.driver.cuLaunchKernelEx(self._configuration(grid, stream), self.function, arguments, 0)
        else:
            result = self.driver.cuLaunchKernel(
                self.function, *grid, self.binary.threads, 1, 1, self.binary.shared_bytes, stream, arguments, 0
            )
        if int(result[0]):  # A step has hundreds of launches: their names are put together for errors only.
            check(result, f"launch {self.binary.entry} with grid {grid}", Path(self.binary.file))

    def _configuration(self, grid: tuple[int, int, int], stream: int) -> Any:
        known = self._configurations.get((grid, stream))
        if known is not None:
            return known
        cuda = self.driver
        attribute = cuda.CUlaunchAttribute()
        attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        configuration = cuda.CUlaunchConfig()
        configuration.gridDimX, configuration.gridDimY, configuration.gridDimZ = grid
        configuration.blockDimX, configuration.blockDimY, configuration.blockDimZ = self.binary.threads, 1, 1
        configuration.sharedMemBytes, configuration.hStream = self.binary.shared_bytes, stream
        configuration.attrs, configuration.numAttrs = [attribute], 1
        if len(self._configurations) == _MOST_CONFIGURATIONS:
            self._configurations.clear()
        self._configurations[grid, stream] = configuration
        return configuration


def load_kernel(binary: DeviceBinary, directory: Path) -> LoadedKernel:
    """Load a binary into the current context."""
    path = directory / binary.file
    if binary.blocks_per_cluster > 1:
        raise EngineFormatError(
            f"the kernel needs clusters of {binary.blocks_per_cluster} blocks; this llmc launches blocks one by one",
            at=path,
            fix="rebuild the engine with this llmc",
        )
    cuda = driver()
    (module,) = check(cuda.cuModuleLoadData(read_regular(path, _MOST_BINARY_BYTES)), "load the kernel", path)
    (function,) = check(cuda.cuModuleGetFunction(module, binary.entry.encode()), f"find {binary.entry}", path)
    if binary.shared_bytes > _PLAIN_SHARED_BYTES:
        attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        action = f"give {binary.entry} {binary.shared_bytes} bytes of shared memory"
        check(cuda.cuFuncSetAttribute(function, attribute, binary.shared_bytes), action, path)
    return LoadedKernel(cuda, module, function, binary)


def check(result: tuple[Any, ...], what: str, path: Path) -> tuple[Any, ...]:
    """The results of a driver call after its status. Raises TargetError with the status if it is not success."""
    status, *values = result
    if int(status) == 0:
        return tuple(values)
    raise driver_error(getattr(status, "name", str(status)), what, path)


def driver_error(status: str, what: str, path: Path) -> TargetError:
    """The error for a failed driver call."""
    if status in _NEWER_DRIVER:
        fix = (
            "update the GPU's driver to one as new as the CUDA toolkit of the triton that built the engine, or build "
            "the engine with the triton of this machine: llmc build MODEL --target auto"
        )
    elif status == "CUDA_ERROR_OUT_OF_MEMORY":
        fix = "lower kv_cache_bytes, or free the GPU of other processes"
    else:
        fix = "set CUDA_LAUNCH_BLOCKING=1 to see which launch failed; report it with the engine's model and this GPU"
    return TargetError(f"the CUDA driver could not {what}: {status}", at=path, fix=fix)
