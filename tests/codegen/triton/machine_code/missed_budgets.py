"""Compare what misses its budget with the list of what may: missed_budgets.json, which may only shrink.

`python -m tests.codegen.triton.machine_code.missed_budgets` prints the list as it is now.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.machine_code.budget_table import budgets
from llmc.codegen.triton.machine_code.figures import kernel_code
from llmc.codegen.triton.machine_code.findings import check_budget
from llmc.targets import GpuTarget
from tests.codegen.triton.machine_code.budget_cases import CASES, case_kernels
from tests.gpu_target import gpu_target

GPUS = ("a100", "h100", "b200")
# By kernel, and its mode, the figures that miss, with their values.
Missed = dict[str, dict[str, float]]
_LIST = Path(__file__).with_name("missed_budgets.json")
_MODES = ("TOKENS", "TOKEN_BLOCK", "SPLITS", "CACHE_FORMAT", "ROW_TILE", "ALTERNATE")


def missed(case: str, target: GpuTarget, workers: Workers, directory: Path) -> tuple[Missed, list[str]]:
    """What a case's kernels miss on a target, and the functions that have no budget."""
    known, misses, without = budgets(), Missed(), list[str]()
    kernels = [replace(kernel, name=f"{kernel.name}.{i}") for i, kernel in enumerate(case_kernels(case, target))]
    (directory / "kernels").mkdir(exist_ok=True)
    for kernel, compiled in zip(kernels, workers.compile_all(kernels, target, directory), strict=True):
        budget = known.get(kernel.function)
        if budget is None:
            without.append(kernel.function)
            continue
        binary = compiled.binary
        code = kernel_code(kernel, binary, directory / binary.file, target, budget.streams)
        mode = [f"{name}={kernel.constants[name]}" for name in _MODES if kernel.constants.get(name) is not None]
        values = {
            finding.limit.figure: -1.0 if finding.value is None else round(finding.value, 3)
            for finding in check_budget(code, budget)
            if not finding.is_met
        }
        misses[" ".join([kernel.function, *mode])] = values
    return misses, without


def allowed(case: str, target: GpuTarget) -> Missed:
    """What the list says."""
    listed: dict[str, dict[str, Missed]] = json.loads(_LIST.read_text(encoding="utf-8"))
    return listed[case][target.arch_name]


def main() -> None:
    """Print the list for all cases and GPUs."""
    listed: dict[str, dict[str, Missed]] = {case: {} for case in CASES}
    with tempfile.TemporaryDirectory() as directory, Workers(2) as workers:
        for case in CASES:
            for name in GPUS:
                target = gpu_target(name)
                listed[case][target.arch_name], _ = missed(case, target, workers, Path(directory))
    print(_text(listed))


def _text(listed: dict[str, dict[str, Missed]]) -> str:
    """As JSON, a line a kernel."""
    cases = []
    for case, by_arch in listed.items():
        arches = (
            f'  "{arch}": {{\n'
            + ",\n".join(f"   {json.dumps(kernel)}: {json.dumps(figures)}" for kernel, figures in kernels.items())
            + "\n  }"
            for arch, kernels in by_arch.items()
        )
        cases.append(f" {json.dumps(case)}: {{\n" + ",\n".join(arches) + "\n }")
    return "{\n" + ",\n".join(cases) + "\n}"


if __name__ == "__main__":
    main()
