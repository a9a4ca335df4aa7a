"""`llmc inspect`: the contents of an engine, without running it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from llmc.cli.cache_text import cache_text
from llmc.cli.repeated_rows import add_rows
from llmc.cli.table import Column, FittingTable, facts, numeric, standard_output
from llmc.cli.units import in_bytes
from llmc.cli.weight_tables import pruning_table, quantization_table, sparsity_table
from llmc.plural import counted

if TYPE_CHECKING:
    from llmc.engine_format import EngineDirectory
    from llmc.prediction.device_step import StepPrediction
    from llmc.program import Launch, Program
    from llmc.targets import GpuTarget


def inspect(
    engine: Annotated[Path, typer.Argument(help="engine directory")],
    launches: Annotated[
        bool, typer.Option("--launches", help="list every launch with its rewrite and source line")
    ] = False,
    weights: Annotated[bool, typer.Option("--weights", help="list every weight with its layout")] = False,
    quantization: Annotated[
        bool, typer.Option("--quantization", help="show scheme, bits and error of each weight")
    ] = False,
    sparsity: Annotated[
        bool, typer.Option("--sparsity", help="show zeros, bits and error of each sparse weight")
    ] = False,
    pruning: Annotated[
        bool, typer.Option("--pruning", help="show the removed share of each part, and its error")
    ] = False,
    sass: Annotated[
        bool, typer.Option("--sass", help="show figures of each GPU kernel's machine code with their budgets")
    ] = False,
    everything: Annotated[
        bool,
        typer.Option("--all", help="show every row of folded tables; with --sass also other steps and met budgets"),
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(help="cached positions of the decode step whose costs are shown; default: up to 1024", min=1),
    ] = None,
    requests: Annotated[int, typer.Option(help="requests of that step; GPUs only", min=1)] = 1,
    prefill: Annotated[
        int | None, typer.Option(help="predict a prompt of this many tokens instead; GPUs only", min=1)
    ] = None,
) -> None:
    """Show an engine's model, limits, kernels, memory and costs. Checks the whole engine first."""
    from llmc.engine_format import read_engine
    from llmc.engine_format.reader import read_pruning, read_quantization, read_sparsity
    from llmc.prediction.device_step import usual_context

    directory = read_engine(engine, check_machine=False)
    if context is None:
        context = usual_context(directory.program.limits)
    console = standard_output()
    console.print(overview(directory))
    if directory.whole_program.launches:
        console.print(kernel_costs(directory, context))
    if directory.program.kernels:
        print_device_tables(console, directory, requests, context, prefill)
    if sass:
        print_machine_code(console, directory, requests, context, prefill, everything=everything)
    if launches:
        print_launches(console, directory.whole_program.launches)
    if weights:
        console.print(weight_list(directory, everything))
    if quantization:
        quantized = read_quantization(directory.files)
        console.print(quantization_table(quantized, everything=everything) if quantized else "no weight is quantized")
    if sparsity:
        sparse = read_sparsity(directory.files)
        console.print(sparsity_table(sparse, everything=everything) if sparse else "no weight is sparse")
    if pruning:
        pruned = read_pruning(directory.files)
        console.print(pruning_table(pruned, everything=everything) if pruned else "nothing was pruned")


def overview(directory: EngineDirectory) -> FittingTable:
    """Model, target, limits and memory."""
    manifest, limits = directory.manifest, directory.manifest.limits
    table = facts(str(directory.path))
    model = manifest.model
    table.add_row("model", f"{model.name} ({model.family}), {model.parameters / 1e6:.1f} M parameters, {model.dtype}")
    table.add_row("vocabulary", str(model.vocab_size))
    table.add_row("target", manifest.target.name)
    table.add_row("needs", ", ".join(manifest.target.features) or "nothing special")
    table.add_row("built by", f"llmc {manifest.llmc_version}")
    table.add_row("longest sequence", f"{counted(limits.max_model_len, 'token')}")
    table.add_row("step", f"{counted(limits.max_batch_tokens, 'token')}, {counted(limits.max_sequences, 'request')}")
    table.add_row("files", in_bytes(sum(record.bytes for record in manifest.files.values())))
    table.add_row("weights", in_bytes(manifest.memory["weights"]))
    arena, unplanned = manifest.memory["arena"], manifest.memory["arena_unplanned"]
    table.add_row("arena", f"{in_bytes(arena)} (buffers sum to {in_bytes(unplanned)})")
    program = directory.whole_program
    sequence = sum(program.memories(limits.blocks_for(limits.max_model_len)).values())
    table.add_row("KV cache", f"{cache_text(program)}; {in_bytes(sequence)} per sequence")
    if states := manifest.memory.get("states_per_sequence", 0):
        table.add_row("states", f"{in_bytes(states)} per sequence and per snapshot")
    rewrites, refusals = sum(p.rewrites for p in manifest.passes), sum(p.refusals for p in manifest.passes)
    table.add_row("passes", f"{counted(rewrites, 'rewrite')}, {counted(refusals, 'near-miss')} (report/passes.json)")
    return table


def kernel_costs(directory: EngineDirectory, context: int) -> FittingTable:
    """Launches, bytes and operations of each kernel in a decode step of one request."""
    from llmc.prediction.cost_expression import evaluate_expression
    from llmc.prediction.step_launches import step_launches
    from llmc.prediction.step_shape import StepShape

    launches, step = directory.whole_program.launches, StepShape.decode(requests=1, context=context)
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for index, parts in step_launches(launches, step):
        total = totals[launches[index].kernel]
        total[0] += 1
        total[1] += sum(evaluate_expression(launches[part].bytes_moved, step.values()) for part in parts)
        total[2] += sum(evaluate_expression(launches[part].flops, step.values()) for part in parts)
    columns = (Column("kernel"), *numeric(("launches", 1), "bytes", ("share", 2), ("FLOPs", 3)))
    table = FittingTable(f"kernels of a decode step, one request at context {context}", columns)
    whole = sum(total[1] for total in totals.values())
    for name, (count, moved, flops) in sorted(totals.items(), key=lambda item: -item[1][1]):
        table.add_row(name, str(count), in_bytes(moved), f"{moved / whole:.1%}", f"{flops:.3g}")
    table.add_section()
    count = sum(int(total[0]) for total in totals.values())
    table.add_row("all", str(count), in_bytes(whole), "100%", f"{sum(t[2] for t in totals.values()):.3g}")
    return table


def print_device_tables(
    console: Console, directory: EngineDirectory, requests: int, context: int, prefill: int | None
) -> None:
    """Print for each GPU the kernels with a step's predicted times, and the choices among alternatives."""
    from llmc.cli.device_kernels import candidates, device_kernels

    for program, target, step in predicted_steps(directory, requests, context, prefill):
        console.print(device_kernels(program, target, step))
        console.print(candidates(program, target))


def print_machine_code(
    console: Console,
    directory: EngineDirectory,
    requests: int,
    context: int,
    prefill: int | None,
    *,
    everything: bool,
) -> None:
    """Figures and budgets of the kernels' machine code, for each NVIDIA GPU."""
    from llmc.cli.machine_code import machine_code_table

    if not directory.program.kernels:
        console.print("no GPU kernel is in the engine")
    for program, target, step in predicted_steps(directory, requests, context, prefill):
        if target.backend == "cuda":
            console.print(machine_code_table(directory.path, program, target, step, everything=everything))
        else:
            console.print(f"{target.name}: machine code is read for NVIDIA's GPUs only")


def predicted_steps(
    directory: EngineDirectory, requests: int, context: int, prefill: int | None
) -> Iterator[tuple[Program, GpuTarget, StepPrediction]]:
    """The program for each GPU, with the prediction of one step: a decode step, or a prefill of that many tokens."""
    from llmc.prediction.device_step import predict_decode, predict_prefill
    from llmc.targets import gpu_target

    for target_program in directory.whole_programs:
        target = gpu_target(target_program.target)
        if prefill is None:
            step = predict_decode(target_program.program, target, requests, context)
        else:
            step = predict_prefill(target_program.program, target, prefill)
        yield target_program.program, target, step


def print_launches(console: Console, launches: tuple[Launch, ...]) -> None:
    """Print every launch in order, one per line, with the nodes, rewrite and source line that it was lowered from."""
    for number, launch in enumerate(launches):
        origin = launch.origin
        parts = (f"{number:4} {launch.kernel:32}", ", ".join(origin.nodes), origin.rewrite, origin.source)
        console.print("  ".join(p for p in parts if p), markup=False, highlight=False, soft_wrap=True)


def weight_list(directory: EngineDirectory, everything: bool) -> FittingTable:
    """Return a table of every weight: shape, layout, bytes."""
    columns = (Column("name"), Column("shape"), Column("dtype", 2), Column("layout", 3), *numeric(("bytes", 1)))
    table = FittingTable("weights", columns)
    rows = []
    for slot in directory.whole_program.weights:
        shape = " × ".join(map(str, slot.shape))
        rows.append((slot.name, shape, slot.dtype, slot.layout.value, in_bytes(slot.nbytes)))
    add_rows(table, rows, everything=everything)
    return table
