"""Compile Triton kernels: read one request per line of standard input, and answer each with a line of JSON.

A separate process, because Triton decides at the definition of a kernel whether it is interpreted, and because several
of them compile in parallel. No GPU is needed. Request: source, function, signature, constants, divisible, num_warps,
num_stages, backend, arch, warp_size, output (a path without suffix). Answer: the fields of DeviceBinary without its
files, with `assembly` (the path of the PTX or AMD assembly); or `error`, with `no_room`: the system's number of an
error for a full disk, or null.
"""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from llmc.codegen.triton.dependent_launch import FIRST_ARCH, waits_for_launch_before, with_dependent_launch
from llmc.codegen.triton.ordered_descriptors import with_ordered_descriptors
from llmc.codegen.triton.portable_ptx import portable_ptx
from llmc.files.storage_error import NO_ROOM
from llmc.processes.lifeline import end_with


def main() -> None:
    """Serve requests until standard input ends; the argument is a lifeline. Output of kernels' modules goes to standard
    error."""
    end_with(int(sys.argv[1]))
    others = os.umask(0o077)  # Triton's cache is private; the files of an engine get the usual permissions.
    importlib.import_module("llmc.ops")  # The kernels' modules name the ops that they compute.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            answer = compile_request(json.loads(line), 0o666 & ~others)
        except Exception as error:
            # Triton raises many types for source that it cannot compile; the asking process raises ours.
            answer = {"error": f"{type(error).__name__}: {error}{_causes(error)}", "no_room": no_room(error)}
        print(json.dumps(answer), file=answers, flush=True)


def _causes(error: BaseException) -> str:
    """The causes of an error: for nested calls, Triton reports the outermost call and chains the actual error."""
    cause = error.__cause__
    return "" if cause is None else f"\ncaused by {type(cause).__name__}: {cause}{_causes(cause)}"


def no_room(error: BaseException) -> int | None:
    """The number of the system's error for a full disk that caused this one, perhaps in a tool's message."""
    text = f"{error}{_causes(error)}"
    numbers = (number for number in NO_ROOM if getattr(error, "errno", None) == number or os.strerror(number) in text)
    return next(numbers, None)


def compile_request(request: dict[str, Any], mode: int) -> dict[str, Any]:
    """Compile one kernel, write its binary, with that mode, and its assembly, say what it needs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    function = load_function(Path(request["source"]), request["function"])
    names = function.arg_names
    signature = {name: request["signature"].get(name, "constexpr") for name in names}
    constants = {name: request["constants"][name] for name in names if signature[name] == "constexpr"}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in request["divisible"]}
    source = (GluonASTSource if function.is_gluon() else ASTSource)(function, signature, constants, attributes)
    target = GPUTarget(request["backend"], request["arch"], request["warp_size"])
    # Products and sums may fuse, as they do in the CPU's kernels; the default depends on Triton's version.
    options = {"num_warps": request["num_warps"], "num_stages": request["num_stages"], "enable_fp_fusion": True}
    is_cuda = request["backend"] == "cuda"
    is_dependent = is_cuda and request["arch"] >= FIRST_ARCH
    with ExitStack() as changes:
        if is_cuda:
            changes.enter_context(line_table_of_ptx())
        if is_dependent:
            options["launch_pdl"] = True  # So that Triton's cache does not give binaries without the instructions.
            changes.enter_context(dependent_launches())
        compiled = triton.compile(source, target=target, options=options)
    binary_kind, assembly_kind = ("cubin", "ptx") if is_cuda else ("hsaco", "amdgcn")
    binary = Path(f"{request['output']}.{binary_kind}")
    binary.write_bytes(compiled.asm[binary_kind])
    binary.chmod(mode)
    assembly = Path(f"{request['output']}.{assembly_kind}")
    text = compiled.asm[assembly_kind]
    packages = Path(triton.__file__).parent.parent
    assembly.write_text(portable_ptx(text, packages) if is_cuda else text, encoding="utf-8")
    metadata = compiled.metadata
    registers, spill_bytes = (
        cuda_resources(binary, metadata.name) if is_cuda else hip_resources(compiled.asm[assembly_kind])
    )
    return {
        "entry": metadata.name,
        "threads": int(metadata.num_warps) * request["warp_size"],
        "blocks_per_cluster": int(metadata.num_ctas),
        "shared_bytes": int(metadata.shared),
        "registers": registers,
        "spill_bytes": spill_bytes,
        "extra_pointers": entry_parameters(compiled.asm[assembly_kind], is_cuda) - len(request["signature"]),
        "scratch_bytes": int(getattr(metadata, "global_scratch_size", 0) or 0),
        "scratch_alignment": int(getattr(metadata, "global_scratch_align", 1) or 1),
        "is_dependent": waits_for_launch_before(text),
        "assembly": str(assembly),
    }


@contextmanager
def line_table_of_ptx() -> Iterator[None]:
    """Have Triton write line tables into PTX, and leave them out of cubins: they hold paths of this machine's files,
    and without them the same kernel gives the same bytes anywhere."""
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    make_cubin = CUDABackend.make_cubin

    def make_plain_cubin(*arguments: Any) -> Any:
        with knobs.compilation.scope():
            knobs.compilation.disable_line_info = True
            return make_cubin(*arguments)

    CUDABackend.make_cubin = make_plain_cubin
    try:
        with knobs.compilation.scope():
            knobs.compilation.disable_line_info = False
            yield
    finally:
        CUDABackend.make_cubin = make_cubin


@contextmanager
def dependent_launches() -> Iterator[None]:
    """Have Triton assemble PTX with the instructions of dependent_launch.py and ordered_descriptors.py."""
    from triton.backends.nvidia.compiler import CUDABackend

    make_ptx = CUDABackend.make_ptx
    CUDABackend.make_ptx = lambda *arguments: with_dependent_launch(with_ordered_descriptors(make_ptx(*arguments)))
    try:
        yield
    finally:
        CUDABackend.make_ptx = make_ptx


def load_function(path: Path, name: str) -> Any:
    """The @triton.jit function of that name in a Python file."""
    module_name = f"llmc_kernels_{path.stem}"
    loaded = sys.modules.get(module_name)
    if loaded is None or loaded.__file__ != str(path):
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = loaded
        spec.loader.exec_module(loaded)
    return getattr(loaded, name)


def cuda_resources(binary: Path, entry: str) -> tuple[int, int]:
    """Registers of a thread, and bytes of local memory that it spills to."""
    from triton import knobs

    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = text[text.index(f"Function {entry}:") :]
    counts = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return counts["REG"], counts["STACK"] + counts["LOCAL"]


def hip_resources(assembly: str) -> tuple[int, int]:
    """Vector registers of a thread, and bytes of scratch memory that it spills to."""
    counts = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", assembly))
    return int(counts["vgpr_count"]), int(counts["private_segment_fixed_size"])


def entry_parameters(assembly: str, is_cuda: bool) -> int:
    """Return the number of parameters of the compiled function."""
    if is_cuda:
        head = assembly[assembly.index(".entry") :]
        return head[: head.index(")")].count(".param ")
    arguments = assembly[assembly.index(".args:") :]
    kinds: list[str] = re.findall(r"\.value_kind:\s+(\w+)", arguments[: arguments.index(".name:", 6)] or arguments)
    return sum(kind in ("by_value", "global_buffer") for kind in kinds)


if __name__ == "__main__":
    main()
