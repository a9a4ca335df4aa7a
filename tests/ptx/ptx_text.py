"""Short PTX kernels as text, and how tests run them."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.ptx.code import load_code
from llmc.ptx.finding import Check, Finding
from llmc.ptx.global_memory import Buffer
from llmc.ptx.machine import Report, execute

Array = npt.NDArray[Any]
_SPACING = 1 << 32
_WIDTHS = {"%p": "pred", "%h": "b16", "%r": "b32", "%d": "b64"}


def kernel_text(body: str, parameters: Sequence[str] = (), *, target: str = "sm_90a", threads: int = 32) -> str:
    """A kernel called `k` with 64-bit parameters. Registers are declared by their names: %p1, %h1, %r1, %d1 have 1, 16,
    32 and 64 bits. Before the body every parameter is in %d_NAME, the thread's number in %r_tid, its number
    among all blocks' in %r_all, and the address of shared memory in %r_smem."""
    numbers = {prefix: [int(n) for n in re.findall(rf"{prefix}(\d+)", body)] for prefix in _WIDTHS}
    count = {prefix: 1 + max(used, default=0) for prefix, used in numbers.items()}
    declared = [f".reg .{kind} {prefix}<{count[prefix]}>;" for prefix, kind in _WIDTHS.items()]
    declared += [f".reg .b64 %d_{name};" for name in parameters]
    loads = [f"ld.param.b64 %d_{name}, [k_{name}];" for name in parameters]
    listed = ", ".join(f".param .u64 k_{name}" for name in parameters)
    lines = [
        ".version 8.0",
        f".target {target}",
        ".address_size 64",
        ".extern .shared .align 16 .b8 shared_memory[];",
        f".visible .entry k({listed})",
        f".reqntid {threads}",
        "{",
        *declared,
        ".reg .b32 %r_tid, %r_smem, %r_all;",
        "mov.u32 %r_tid, %tid.x;",
        "mov.u32 %r_all, %ctaid.x;",
        f"mad.lo.s32 %r_all, %r_all, {threads}, %r_tid;",
        "mov.b32 %r_smem, shared_memory;",
        *loads,
        body,
        "ret;",
        "}",
    ]
    return "\n".join(lines) + "\n"


def run_text(
    text: str,
    arguments: Mapping[str, Array | int],
    *,
    threads: int = 32,
    grid: tuple[int, int, int] = (1, 1, 1),
    shared_bytes: int = 0,
    read_only: Sequence[str] = (),
    unwritten: Sequence[str] = (),
    constant: Sequence[str] = (),
    **options: Any,
) -> Report:
    """Run a kernel. arguments: in the parameters' order; arrays are changed in place. unwritten: arrays that have no
    values yet, and are outputs that have to get some. constant: those that no earlier launch may still write."""
    buffers, values = list[Buffer](), list[bytes]()
    for place, (name, given) in enumerate(arguments.items()):
        if isinstance(given, int):
            values.append(struct.pack("<q", given))
            continue
        octets = given.reshape(-1).view(np.uint8)
        written = np.zeros(octets.size, np.uint8) if name in unwritten else None
        buffers.append(
            Buffer(
                name,
                (1 + place) * _SPACING,
                octets,
                is_writable=name not in read_only,
                may_change=name not in constant,
                written=written,
            )
        )
        values.append(struct.pack("<Q", (1 + place) * _SPACING))
    code = load_code(text, "test.ptx", threads=threads, shared_bytes=shared_bytes)
    outputs = [buffer for buffer in buffers if buffer.name in unwritten]
    return execute(code, grid, values, buffers, outputs=outputs, **options)


def the_finding(report: Report, check: Check) -> Finding:
    """The one finding of a report, which must be of that kind."""
    assert [finding.check for finding in report.findings] == [check], (
        "\n".join(map(str, report.findings)) or "nothing found"
    )
    return report.findings[0]


_SUFFIX = {1: "8", 2: "16", 4: "32", 8: "64"}
_PREFIX = {2: "%h", 4: "%r", 8: "%d"}


def apply(opcode: str, *operands: Array, result: Any, target: str = "sm_90a") -> Array:
    """What an instruction computes of arrays, elementwise: one thread an element. result: its dtype."""
    blocks = -(-len(operands[0]) // 32)
    padded = [np.resize(operand, 32 * blocks) for operand in operands]
    results = np.zeros(32 * blocks, result)
    body = []
    for i, operand in enumerate(padded):
        size = operand.itemsize
        body += [
            f"mad.wide.u32 %d{i}, %r_all, {size}, %d_a{i};",
            f"ld.global.b{_SUFFIX[size]} {_PREFIX[max(size, 2)]}{10 + i}, [%d{i}];",
        ]
    size = results.itemsize
    names = [f"{_PREFIX[max(operand.itemsize, 2)]}{10 + i}" for i, operand in enumerate(padded)]
    body += [
        f"{opcode} {_PREFIX[max(size, 2)]}20, {', '.join(names)};",
        f"mad.wide.u32 %d9, %r_all, {size}, %d_y;",
        f"st.global.b{_SUFFIX[size]} [%d9], {_PREFIX[max(size, 2)]}20;",
    ]
    inputs = {f"a{i}": operand for i, operand in enumerate(padded)}
    text = kernel_text("\n".join(body), [*inputs, "y"], target=target)
    report = run_text(text, {**inputs, "y": results}, grid=(blocks, 1, 1))
    assert not report.findings
    return results[: len(operands[0])]
