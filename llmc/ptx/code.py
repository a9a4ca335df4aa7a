"""A kernel made ready to be executed: runs of actions, each ended by an instruction that says what comes next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmc.ptx.elementwise import Action
from llmc.ptx.errors import PtxError
from llmc.ptx.kernel_plan import KernelPlan, plan_kernel
from llmc.ptx.module import Address, Immediate, Instruction, Kernel, Module, Operand, Pair, Register, Vector
from llmc.ptx.opcodes import build
from llmc.ptx.parse import parse_module
from llmc.ptx.refusal import Refusal, Refused
from llmc.ptx.schedule import Strand
from llmc.ptx.statements import REBUILD
from llmc.ptx.team import End, Ending, Team

KNOWN_TARGETS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a")
# The maximum over the GPUs of KNOWN_TARGETS.
MOST_SHARED_BYTES = 227 << 10
_LEAST_VERSION, _MOST_VERSION = (7, 0), (9, 99)


@dataclass(frozen=True)
class Step:
    """An action with data for the checks of wgmma. touched: registers that some wgmma also uses. copied: target and
    source of a move to a register; the source is None for a number."""

    run: Action
    at: Instruction
    touched: frozenset[int]
    copied: tuple[int, int | None] | None


@dataclass(frozen=True)
class Segment:
    """Consecutive instructions, and the end that decides where execution continues. last: the last instruction."""

    steps: tuple[Step, ...]
    end: End
    count: int
    last: Instruction


@dataclass(frozen=True)
class Code:
    """A kernel that can be executed. segments: by the place of their first instruction."""

    plan: KernelPlan
    segments: Mapping[int, Segment]


def load_code(text: str, name: str, *, threads: int, shared_bytes: int, entry: str | None = None) -> Code:
    """Make a kernel ready.

    Args:
        text: PTX.
        name: the name of the file, for errors and findings.
        threads: threads per block.
        shared_bytes: dynamic shared memory of a block.
        entry: the kernel's name; None for the only one.

    Raises:
        PtxError: the text is damaged, is for another machine, or has an opcode that the machine does not know.
    """
    module = parse_module(text, name)
    _check_version(module)
    kernel = _entry(module, entry)
    wanted = kernel.threads or (threads,)
    if threads % 32 or not 0 < threads <= 1024 or wanted[0] != threads or any(size != 1 for size in wanted[1:]):
        raise PtxError(
            f"{kernel.name} is for blocks of {' x '.join(map(str, wanted))} threads and is launched with {threads}",
            at=name,
            fix="launch the number of warps that the kernel was compiled for, along the first axis",
        )
    if any(size != 1 for size in kernel.cluster):
        raise PtxError(
            f"{kernel.name} is for clusters of {' x '.join(map(str, kernel.cluster))} blocks; the machine has none",
            at=name,
            fix="compile it for one block a cluster (num_ctas=1)",
        )
    plan = plan_kernel(kernel, name, threads, shared_bytes)
    if plan.shared_bytes > MOST_SHARED_BYTES:
        raise PtxError(
            f"{kernel.name} takes {plan.shared_bytes} bytes of shared memory; a block has at most {MOST_SHARED_BYTES}",
            at=name,
            fix=REBUILD,
        )
    built, refusals = _build_all(plan)
    if refusals:
        others = "" if len(refusals) == 1 else f", and {len(refusals) - 1} more"
        raise PtxError(
            f"the machine does not execute {kernel.name}: {refusals[0].reason}{others}",
            at=f"{name}:{refusals[0].instruction.line}",
            fix="`llmc ptx ENGINE` lists what the machine lacks; run the engine on its GPU, or by executor='reference'",
        )
    return Code(plan, _segments(kernel, built))


def refusals_of(kernel: Kernel) -> list[Refusal]:
    """Return why instructions of a kernel cannot be executed, each opcode once."""
    refusals = _build_all(plan_kernel(kernel, "", 0, 0))[1]
    return list({refusal.instruction.opcode: refusal for refusal in refusals}.values())


def _check_version(module: Module) -> None:
    if module.target not in KNOWN_TARGETS:
        raise PtxError(
            f"the PTX is for {module.target}; the machine executes {', '.join(KNOWN_TARGETS)}",
            at=module.name,
            fix="build the engine for a GPU of these, such as --target h100 or a100",
        )
    if not _LEAST_VERSION <= module.version <= _MOST_VERSION:
        low, high = (".".join(map(str, version)) for version in (_LEAST_VERSION, _MOST_VERSION))
        raise PtxError(
            f"the PTX is of version {module.version[0]}.{module.version[1]}; the machine knows {low} to {high}",
            at=module.name,
            fix=REBUILD,
        )


def _entry(module: Module, name: str | None) -> Kernel:
    kernels = [kernel for kernel in module.kernels if name in (None, kernel.name)]
    if len(kernels) != 1:
        known = ", ".join(kernel.name for kernel in module.kernels)
        raise PtxError(f"the file has the kernels {known}, not exactly one {name}", at=module.name, fix=REBUILD)
    return kernels[0]


def _build_all(plan: KernelPlan) -> tuple[list[Action | Ending], list[Refusal]]:
    built, refusals = list[Action | Ending](), list[Refusal]()
    for place, instruction in enumerate(plan.kernel.instructions):
        try:
            built.append(build(instruction, place, plan.symbols, plan.kernel))
        except Refused as refused:
            refusals.append(refused.refusal)
    return built, refusals


def _segments(kernel: Kernel, built: Sequence[Action | Ending]) -> dict[int, Segment]:
    """Return a segment for each place at which threads may continue."""
    registers = _wgmma_registers(kernel)
    starts = set(kernel.labels.values())
    segments: dict[int, Segment] = {}
    steps: list[Step] = []
    first = 0
    for place, (at, action) in enumerate(zip(kernel.instructions, built, strict=True)):
        if place in starts and place > first:
            segments[first] = Segment(
                tuple(steps), _falling_through(place), place - first, kernel.instructions[place - 1]
            )
            first, steps = place, []
        touched = frozenset[int]() if at.opcode.startswith("wgmma") else _registers(at) & registers
        if isinstance(action, Ending):
            segments[first] = Segment(tuple(steps), _watched(action.go, touched, at), place + 1 - first, at)
            first, steps = place + 1, []
        else:
            steps.append(Step(action, at, touched, _copied(at)))
    segments[first] = Segment(tuple(steps), _returning(kernel), len(built) - first, kernel.instructions[-1])
    return segments


def _falling_through(place: int) -> End:
    return lambda team, strand: team.schedule.go(place, strand.mask)


def _returning(kernel: Kernel) -> End:
    """The end of the text is one of the kernel."""
    last = kernel.instructions[-1]
    return lambda team, strand: team.end(strand.mask, last)


def _watched(end: End, touched: frozenset[int], at: Instruction) -> End:
    """An end that touches registers which some wgmma takes."""
    if not touched:
        return end

    def watched(team: Team, strand: Strand) -> None:
        team.warpgroups.touch(touched, None, strand.mask, at)
        end(team, strand)

    return watched


def _wgmma_registers(kernel: Kernel) -> frozenset[int]:
    """The sums of every wgmma, its operands in registers, and all that is moved to these."""
    registers = set[int]()
    for instruction in kernel.instructions:
        if instruction.opcode.startswith("wgmma.mma_async"):
            registers |= {
                r.index for operand in instruction.operands[:2] for r in _registers_of(operand) if r.nbytes == 4
            }
    moves = [copied for candidate in kernel.instructions if (copied := _copied(candidate)) is not None]
    before = -1
    while registers and len(registers) != before:
        before = len(registers)
        registers |= {source for target, source in moves if target in registers and source is not None}
    return frozenset(registers)


def _copied(at: Instruction) -> tuple[int, int | None] | None:
    """The target and the source of a move to a register, which all its threads make; of a number the source is None."""
    if not at.opcode.startswith("mov.") or at.guard is not None or len(at.operands) != 2:
        return None
    target, source = at.operands
    if not isinstance(target, Register) or not isinstance(source, Register | Immediate):
        return None
    return target.index, source.index if isinstance(source, Register) else None


def _registers(instruction: Instruction) -> frozenset[int]:
    return frozenset(r.index for operand in instruction.operands for r in _registers_of(operand))


def _registers_of(operand: Operand) -> list[Register]:
    if isinstance(operand, Register):
        return [operand]
    if isinstance(operand, Vector):
        return [r for item in operand.items for r in _registers_of(item)]
    if isinstance(operand, Pair):
        return _registers_of(operand.first) + _registers_of(operand.second)
    if isinstance(operand, Address):
        return _registers_of(operand.base) + [r for item in operand.coordinates for r in _registers_of(item)]
    return []
