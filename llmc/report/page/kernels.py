"""The launches of a step as a report holds them: cost expressions, origins, and the code that each one runs."""

import re
from functools import cache
from itertools import pairwise
from typing import Any

from llmc.codegen.cpp.kernel_api import kernel_include_dir
from llmc.codegen.cpp.kernel_library import function_name
from llmc.files.typed_json import to_json
from llmc.prediction.launch_cost import launch_costs
from llmc.program import DeviceKernel, Launch, Program
from llmc.report.contents import EngineContents
from llmc.report.machine_code import KernelBudgets
from llmc.report.profile import kernel_class

# As codegen/cpp/step.py prints them: a mark after every launch, and loops as separate functions.
_MARK = re.compile(r"^  mark\(times, (\d+)\);$", re.MULTILINE)
# A function of the kernel library, or what a macro makes ones of, by its name after llmc_.
_DEFINED = re.compile(r"(?:LLMC_KERNELS?\(\w+, |\bllmc_)(\w+)")
_LOOP = re.compile(r"(?:^//[^\n]*\n)*^static void (loop_\w+)\(.*?^\}\n", re.MULTILINE | re.DOTALL)


def kernels_data(contents: EngineContents, budgets: KernelBudgets | None = None) -> dict[str, Any]:
    """{"launches": […], "classes": […], "code": {name: text}}.

    A class is a kernel with the sizes that decide its time; its launches are shown as one. A launch has its class, cost
    expressions, nodes, rewrite, source, the snippet of its call, and the steps that run it (`only`). budgets: those of
    GPU kernels' machine code, shown with the class of the kernel.
    """
    program = contents.program
    code = {name: text for name, text in contents.code.items() if "/" in name}
    calls, loops = _snippets(contents.code)
    classes: dict[str, dict[str, Any]] = {}
    launches = []
    for index, (launch, cost) in enumerate(zip(program.launches, launch_costs(program), strict=True)):
        name = kernel_class(launch)
        if name not in classes:
            classes[name] = {"name": name, "kernel": launch.kernel} | _code_of(launch, program, contents, loops, code)
            if launch.kernel in (budgets or {}):
                classes[name]["budgets"] = to_json((budgets or {})[launch.kernel])
        launches.append(
            {
                "class": list(classes).index(name),
                "bytes": cost.bytes_moved,
                "flops": cost.flops,
                "packed": cost.packed,
                "kind": cost.kind,
                "rows": cost.rows,
                "parts": cost.parts,
                "depth": cost.depth,
                "depth_tile": cost.depth_tile,
                "shared": cost.is_shared,
                **to_json(launch.origin),
                "call": calls.get(index, _arguments(launch)),
                "only": to_json(launch.only),
            }
        )
    return {"launches": launches, "classes": list(classes.values()), "code": code}


def _snippets(code: dict[str, str]) -> tuple[dict[int, str], dict[str, str]]:
    """Return from a CPU engine's source the lines of each launch by its index, and the function of each loop by its
    name."""
    calls: dict[int, str] = {}
    loops: dict[str, str] = {}
    for text in (text for name, text in code.items() if name.endswith("engine.cpp")):
        loops |= {match[1]: match[0].strip() for match in _LOOP.finditer(text)}
        marks, begun = list(_MARK.finditer(text)), len(calls)
        for before, after in pairwise(marks):
            lines = text[before.end() : after.start()].strip("\n").splitlines()
            calls[begun + int(after[1]) - 1] = "\n".join(line.removeprefix("  ") for line in lines)
    return calls, loops


def _arguments(launch: Launch) -> str:
    arguments = ", ".join(f"{name}={value}" for name, value in launch.arguments.items())
    grid = f"[{', '.join(launch.grid)}]" if launch.grid else ""
    return f"{launch.kernel}{grid}({arguments})"


def _code_of(
    launch: Launch, program: Program, contents: EngineContents, loops: dict[str, str], code: dict[str, str]
) -> dict[str, Any]:
    """Return the kernel's own code: a generated loop's text, or the name of a file in `code`."""
    if launch.kernel in loops:
        return {"text": loops[launch.kernel], "language": "cpp"}
    device = next((kernel for kernel in program.kernels if kernel.name == launch.kernel), None)
    if device is not None:
        return {"file": device.source, "language": "python", "device": _device(device)}
    file = _hand_written(launch)
    if file is None:
        return {}
    code.setdefault(file, (kernel_include_dir() / file).read_text(encoding="utf-8"))
    return {"file": file, "language": "cpp"}


def _hand_written(launch: Launch) -> str | None:
    """The file of the kernel library that defines the launch's function; a macro may add the element types to it."""
    for count in range(len(launch.dtypes), -1, -1):
        name = function_name(launch.family, launch.dtypes[:count]).removeprefix("llmc_")
        source = next((file for defined, file in _definitions() if f"{defined}_".startswith(f"{name}_")), None)
        if source is not None:
            return source
    return None


@cache
def _definitions() -> tuple[tuple[str, str], ...]:
    """Names that the kernel library's files define or call, in file order, with the file."""
    texts = ((file.name, file.read_text(encoding="utf-8")) for file in sorted(kernel_include_dir().glob("*.cpp")))
    return tuple((match[1], name) for name, text in texts for match in _DEFINED.finditer(text))


def _device(kernel: DeviceKernel) -> dict[str, Any]:
    return {
        "function": kernel.function,
        "warps": kernel.num_warps,
        "stages": kernel.num_stages,
        "constants": {name: str(value) for name, value in kernel.constants.items()},
        "binaries": {
            arch: {
                "threads": binary.threads,
                "registers": binary.registers,
                "spills": binary.spill_bytes,
                "shared": binary.shared_bytes,
            }
            for arch, binary in kernel.binaries.items()
        },
    }
