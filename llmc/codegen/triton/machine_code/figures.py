"""Figures of a kernel's machine code: what its main loop costs, and how much memory it keeps in flight."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llmc.codegen.triton.machine_code.control_flow import ControlFlow, Loop, control_flow
from llmc.codegen.triton.machine_code.device_limits import blocks_per_sm
from llmc.codegen.triton.machine_code.disassembly import Instruction, MachineCode, disassemble
from llmc.codegen.triton.machine_code.pointers import accessed_parameters
from llmc.program import DeviceBinary, DeviceKernel
from llmc.targets import GpuTarget

_BULK_COPIES = ("UTMALDG", "UBLKCP")
# A request to the L2 cache.
_PREFETCH = "UBLKPF"
# The operand of a wait for matrix instructions of a group of warps after which none is running.
_NO_PRODUCT = ",0x0"
_MATRIX = ("HMMA", "IMMA", "QMMA", "OMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA")
# griddepcontrol.launch_dependents and griddepcontrol.wait.
_LAUNCH_DEPENDENTS, _WAIT = "PREEXIT", "ACQBULK"


@dataclass(frozen=True)
class KernelCode:
    """One compiled kernel, for questions about its machine code.

    Attributes:
        kernel: The specialization.
        binary: Its resources.
        code: Its instructions.
        target: The GPU that it was compiled for.
        streams: Pointer parameters whose memory the kernel reads once and is bound by, such as `("weight_ptr",)`.
    """

    kernel: DeviceKernel
    binary: DeviceBinary
    code: MachineCode
    target: GpuTarget
    streams: tuple[str, ...]

    @cached_property
    def flow(self) -> ControlFlow:
        return control_flow(self.code.instructions)

    @cached_property
    def main_loop(self) -> tuple[Instruction, ...]:
        """Instructions of the innermost loop that reads most of the streams, or else multiplies most.

        Without a loop, as where the compiler has unrolled one of few turns: those up to the first exchange between
        threads after the last load of the streams.
        """
        loops = self.flow.innermost_loops()
        best = max(loops, key=self._work, default=None)
        if best is not None:
            return best.instructions
        whole = self.code.instructions
        last = max((load.address for load in self.stream_loads(whole)), default=None)
        ends = (i for i, x in enumerate(whole) if last is not None and x.address > last and x.name in ("BAR", "STS"))
        return whole[: next(ends, len(whole))]

    def _work(self, loop: Loop) -> tuple[int, int, int]:
        return self.stream_bytes(loop.instructions), _count(loop.instructions, *_MATRIX), len(loop.blocks)

    @cached_property
    def _accessed(self) -> dict[int, frozenset[str]]:
        return dict(accessed_parameters(self.flow, self.kernel.parameters, self.code.arch))

    def stream_loads(self, instructions: Sequence[Instruction]) -> list[Instruction]:
        """Loads and asynchronous copies of the streams, among some instructions."""
        return [
            instruction
            for instruction in instructions
            if instruction.name in ("LDG", "LDGSTS")
            and self._accessed.get(instruction.address, frozenset()) & set(self.streams)
        ]

    def stream_bytes(self, instructions: Sequence[Instruction]) -> int:
        """Bytes of the streams that a thread reads in some instructions, each carried out once."""
        return sum(load.width for load in self.stream_loads(instructions))

    @property
    def instructions_per_byte(self) -> float | None:
        """Instructions of the main loop for each byte of the streams that a thread reads in it; None if it reads none.

        None too where bulk copies bring it, whose size no instruction says.
        """
        moved = self.stream_bytes(self.main_loop)
        return len(self.main_loop) / moved if moved else None

    @property
    def narrow_loads(self) -> int:
        """Loads of the streams in the main loop that are narrower than 16 bytes per thread."""
        return sum(load.width < 16 for load in self.stream_loads(self.main_loop))

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that a multiprocessor holds at once, by registers, threads and shared memory."""
        return blocks_per_sm(self.target, self.binary.threads, self.binary.registers, self.binary.shared_bytes)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of the streams that a multiprocessor can have in flight.

        For loads into registers: the maximum between two waits, by the scoreboards, in two iterations of the main loop.
        For copies into shared memory: all stages of the ring except the one that is being read.
        """
        if any(instruction.name in ("LDGSTS", *_BULK_COPIES) for instruction in self.code.instructions):
            stages = max(2, self.kernel.num_stages)
            return self.binary.shared_bytes * self.blocks_per_sm * (stages - 1) // stages
        return self._outstanding() * self.binary.threads * self.blocks_per_sm

    def _outstanding(self) -> int:
        loads = {load.address for load in self.stream_loads(self.main_loop)}
        pending: dict[int, int] = {}
        most = 0
        for instruction in (*self.main_loop, *self.main_loop):
            for scoreboard in instruction.waits:
                pending.pop(scoreboard, None)
            if instruction.address in loads and instruction.write_scoreboard is not None:
                pending[instruction.write_scoreboard] = pending.get(instruction.write_scoreboard, 0) + instruction.width
            most = max(most, sum(pending.values()))
        return most

    @property
    def stack_bytes(self) -> int:
        """Bytes of local memory of a thread: its stack and what is spilled."""
        return self.binary.spill_bytes

    @property
    def shared_accesses(self) -> int:
        """Loads and stores of shared memory in the main loop."""
        return _count(self.main_loop, "LDS", "STS", "LDSM", "STSM")

    @property
    def barriers(self) -> int:
        """Barriers of a whole block in the main loop; those of some of its warps say how many threads they are for."""
        return sum(instruction.name == "BAR" and "," not in instruction.operands for instruction in self.main_loop)

    @property
    def exposed_exponentials(self) -> int:
        """Exponentials in the main loop that run while no product does: behind the wait for all of them."""
        behind = False
        exposed = 0
        for instruction in self.main_loop:
            if instruction.name == "WARPGROUP" and "DEPBAR" in instruction.modifiers:
                behind = instruction.operands.endswith(_NO_PRODUCT)
            exposed += behind and instruction.name == "MUFU"
        return exposed

    @property
    def conversions(self) -> int:
        """Conversions from integers in the main loop."""
        return _count(self.main_loop, "I2F", "I2FP")

    @property
    def matrix_instructions(self) -> int:
        """Number of matrix instructions in the main loop."""
        return _count(self.main_loop, *_MATRIX)

    @property
    def bulk_copies(self) -> int:
        """Bulk copies of tiles, anywhere in the kernel."""
        return _count(self.code.instructions, *_BULK_COPIES)

    @property
    def register_moves(self) -> int:
        """Places where warps give registers to others, anywhere in the kernel."""
        return _count(self.code.instructions, "USETMAXREG")

    @property
    def unfused_multiplies(self) -> int:
        """Sums in the main loop of a product that was rounded, where one instruction could do both: nothing but sums
        reads the product."""
        # By register, the sums of the product that it holds; None if the product itself is needed.
        products: dict[int, int | None] = {}
        unfused = 0
        for instruction in self.main_loop:
            numbers = [register.number for register in instruction.registers if not register.is_uniform]
            for number in products.keys() & set(numbers[1:]):
                sums = products[number]
                products[number] = sums + 1 if instruction.name == "FADD" and sums is not None else None
            for number in numbers[:1]:
                unfused += products.pop(number, None) or 0
            if instruction.name == "FMUL":
                products.update(dict.fromkeys(numbers[:1], 0))
        return unfused + sum(sums or 0 for sums in products.values())

    @property
    def exits_before_wait(self) -> int:
        """Ways out of the kernel that do not wait for the launch before it."""
        return sum(
            instruction.name == "EXIT" and not self._is_behind_wait(instruction)
            for instruction in self.code.instructions
        )

    @property
    def stores_before_wait(self) -> int:
        """Stores to global memory that do not wait for the launch before it."""
        names = ("STG", "RED", "ATOMG", "UTMASTG")
        return sum(
            instruction.name in names and not self._is_behind_wait(instruction)
            for instruction in self.code.instructions
        )

    @property
    def stream_loads_before_wait(self) -> int:
        """Loads of the streams, bulk copies and requests to the L2 cache before the wait for the launch before."""
        wait = next((instruction.address for instruction in self.code.instructions if instruction.name == _WAIT), None)
        if wait is None:
            return 0
        before = [instruction for instruction in self.code.instructions if instruction.address < wait]
        return len(self.stream_loads(before)) + _count(before, *_BULK_COPIES, _PREFETCH)

    @property
    def releases_dependents_first(self) -> bool:
        """Whether the next launch is let in before the wait for the one before."""
        names = [instruction.name for instruction in self.code.instructions]
        return _LAUNCH_DEPENDENTS in names and _WAIT in names and names.index(_LAUNCH_DEPENDENTS) < names.index(_WAIT)

    def _is_behind_wait(self, instruction: Instruction) -> bool:
        waits = (wait for wait in self.code.instructions if wait.name == _WAIT)
        return any(self.flow.dominating(wait, instruction) for wait in waits)


def kernel_code(
    kernel: DeviceKernel, binary: DeviceBinary, file: Path, target: GpuTarget, streams: tuple[str, ...]
) -> KernelCode:
    """Read a compiled kernel's machine code. file: the cubin. Raises ToolchainError as `disassemble` does."""
    return KernelCode(kernel, binary, disassemble(file, binary.entry), target, streams)


def _count(instructions: Sequence[Instruction], *names: str) -> int:
    return sum(instruction.name in names for instruction in instructions)
