"""A GPU's kernels as data."""

from dataclasses import dataclass, field

from llmc.files.typed_json import LEFT_OUT

# In place of a source file: the kernel is a library's.
LIBRARY = "library"


@dataclass(frozen=True)
class DeviceParameter:
    """A run-time parameter of a GPU kernel, in order. type: as Triton writes it (*bf16, *i32, i32, fp32).

    divisible: the kernel was compiled for multiples of 16 only; for a pointer, this holds for the address in bytes.
    """

    name: str
    type: str
    divisible: bool


@dataclass(frozen=True)
class DeviceBinary:
    """A kernel compiled for one instruction set. file: in the engine. entry: the function's name in it.

    threads: threads per block. shared_bytes: dynamic shared memory of a block. registers, spill_bytes: per thread.
    extra_pointers: trailing pointer parameters that Triton added; the first is to global scratch memory of
    scratch_bytes a block, the others may be null. assembly: the file with the compressed PTX that it was assembled
    from; None if the engine does not keep it. is_dependent: blocks wait for the launch before by themselves, so a
    launch may begin before that one has ended.
    """

    file: str
    entry: str
    threads: int
    blocks_per_cluster: int
    shared_bytes: int
    registers: int
    spill_bytes: int
    extra_pointers: int
    scratch_bytes: int
    scratch_alignment: int
    assembly: str | None = field(default=None, metadata=LEFT_OUT)
    is_dependent: bool = field(default=False, metadata=LEFT_OUT)

    @property
    def files(self) -> tuple[str, ...]:
        """The kernel's files in the engine."""
        return (self.file,) if self.assembly is None else (self.file, self.assembly)


@dataclass(frozen=True)
class DeviceKernel:
    """One specialization of a Triton function. source: the Python file in the engine that defines `function`.

    constants: the values of its tl.constexpr parameters, and None for pointers that are absent. binaries: by
    instruction set (sm_90, gfx942); none for a kernel that only alternatives use. With source LIBRARY it is a call of
    llmc/program/library_functions.py instead, which has no binaries.
    """

    name: str
    source: str
    function: str
    parameters: tuple[DeviceParameter, ...]
    constants: dict[str, int | float | bool | str | None]
    num_warps: int
    num_stages: int
    binaries: dict[str, DeviceBinary] = field(default_factory=dict)

    @property
    def is_library(self) -> bool:
        return self.source == LIBRARY
