"""`llmc inspect`: what is in an engine, without running it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from llmc.cli.cache_text import cache_text
from llmc.cli.table import Column, FittingTable, facts, numeric, standard_output
from llmc.cli.units import in_bytes, in_seconds
from llmc.cli.weight_tables import pruning_table, quantization_table, sparsity_table
from llmc.prediction.device_step import StepPrediction
from llmc.program import Launch, Program
from llmc.targets import GpuTarget

if TYPE_CHECKING:
    from llmc.engine_format import EngineDirectory
    from llmc.program import Launch


def inspect(
    engine: Annotated[Path, typer.Argument(help="engine directory")],
    launches: Annotated[bool, typer.Option("--launches", help="every launch with where it comes from")] = False,
    weights: Annotated[bool, typer.Option("--weights", help="every weight with its layout")] = False,
    quantization: Annotated[bool, typer.Option("--quantization", help="scheme, bits and error of each weight")] = False,
    sparsity: Annotated[bool, typer.Option("--sparsity", help="zeros, bits and error of each sparse weight")] = False,
    pruning: Annotated[bool, typer.Option("--pruning", help="what was taken out of each part, and its error")] = False,
    context: Annotated[
        int | None,
        typer.Option(help="cached positions of the decode step that costs are for; default: up to 1024", min=1),
    ] = None,
    requests: Annotated[int, typer.Option(help="requests of that step; on GPUs", min=1)] = 1,
    prefill: Annotated[int | None, typer.Option(help="instead, a prompt of so many tokens; on GPUs", min=1)] = None,
) -> None:
    """Show an engine's model, limits, kernels, memory and costs. Checks the whole engine first."""
    from llmc.engine_format import read_engine
    from llmc.engine_format.reader import read_pruning, read_quantization, read_sparsity

    directory = read_engine(engine, check_machine=False)
    if context is None:
        context = min(1024, directory.program.limits.max_model_len)
    console = standard_output()
    console.print(overview(directory))
    if directory.whole_program.launches:
        console.print(kernel_costs(directory, context))
    if directory.program.kernels:
        print_device_tables(console, directory, requests, context, prefill)
    if launches:
        print_launches(console, directory.whole_program.launches)
    if weights:
        console.print(weight_list(directory))
    if quantization:
        quantized = read_quantization(directory.files)
        console.print(quantization_table(quantized) if quantized else "no weight is quantized")
    if sparsity:
        sparse = read_sparsity(directory.files)
        console.print(sparsity_table(sparse) if sparse else "no weight is sparse")
    if pruning:
        pruned = read_pruning(directory.files)
        console.print(pruning_table(pruned) if pruned else "nothing was pruned")


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
    table.add_row("longest sequence", f"{limits.max_model_len} tokens")
    table.add_row("step", f"{limits.max_batch_tokens} tokens, {limits.max_sequences} requests")
    table.add_row("files", in_bytes(sum(record.bytes for record in manifest.files.values())))
    table.add_row("weights", in_bytes(manifest.memory["weights"]))
    arena, unplanned = manifest.memory["arena"], manifest.memory["arena_unplanned"]
    table.add_row("arena", f"{in_bytes(arena)} (buffers sum to {in_bytes(unplanned)})")
    program = directory.program
    sequence = sum(program.memories(limits.blocks_for(limits.max_model_len)).values())
    table.add_row("KV cache", f"{cache_text(program)}; {in_bytes(sequence)} a sequence")
    if states := manifest.memory.get("states_per_sequence", 0):
        table.add_row("states", f"{in_bytes(states)} a sequence, and a snapshot")
    rewrites, refusals = sum(p.rewrites for p in manifest.passes), sum(p.refusals for p in manifest.passes)
    table.add_row("passes", f"{rewrites} rewrites, {refusals} near-misses (report/passes.json)")
    return table


def kernel_costs(directory: EngineDirectory, context: int) -> FittingTable:
    """Launches, bytes and operations of each kernel in a decode step of one request."""
    from llmc.prediction.cost_expression import evaluate_expression

    step = {"T": 1, "L": 1, "R": 1, "C": context, "A": context}
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for launch in directory.whole_program.launches:
        if not launch.runs(tokens=1, logit_rows=1):
            continue
        total = totals[launch.kernel]
        total[0] += 1
        total[1] += evaluate_expression(launch.bytes_moved, step)
        total[2] += evaluate_expression(launch.flops, step)
    columns = (Column("kernel"), *numeric(("launches", 1), "bytes", ("share", 2), ("FLOPs", 3)))
    table = FittingTable(f"kernels of a decode step, one request at context {context}", columns)
    whole = sum(total[1] for total in totals.values())
    for name, (count, moved, flops) in sorted(totals.items(), key=lambda item: -item[1][1]):
        table.add_row(name, str(count), in_bytes(moved), f"{moved / whole:.1%}", f"{flops:.3g}")
    table.add_section()
    launches = sum(int(total[0]) for total in totals.values())
    table.add_row("all", str(launches), in_bytes(whole), "100%", f"{sum(t[2] for t in totals.values()):.3g}")
    return table


def print_device_tables(
    console: Console, directory: EngineDirectory, requests: int, context: int, prefill: int | None
) -> None:
    """The kernels with a step's predicted times, and the choices that were made, for each GPU."""
    from llmc.prediction.device_step import predict_decode, predict_prefill
    from llmc.targets import gpu_target

    for each in directory.programs:
        target = gpu_target(each.target)
        if prefill is None:
            step = predict_decode(each.program, target, requests, context)
        else:
            step = predict_prefill(each.program, target, prefill)
        console.print(device_kernels(each.program, target, step))
        console.print(candidates(each.program, target))


def print_launches(console: Console, launches: tuple[Launch, ...]) -> None:
    """Every launch in order, with the nodes, rewrite and source line it came from; a line each, however long."""
    for number, launch in enumerate(launches):
        origin = launch.origin
        parts = (f"{number:4} {launch.kernel:32}", ", ".join(origin.nodes), origin.rewrite, origin.source)
        console.print("  ".join(p for p in parts if p), markup=False, highlight=False, soft_wrap=True)


def weight_list(directory: EngineDirectory) -> FittingTable:
    """Every weight: shape, layout, bytes."""
    columns = (Column("name"), Column("shape"), Column("dtype", 2), Column("layout", 3), *numeric(("bytes", 1)))
    table = FittingTable("weights", columns)
    for slot in directory.whole_program.weights:
        shape = " × ".join(map(str, slot.shape))
        table.add_row(slot.name, shape, slot.dtype, slot.layout.value, in_bytes(slot.nbytes))
    return table


def device_kernels(program: Program, target: GpuTarget, found: StepPrediction) -> FittingTable:
    """A row for each kernel. found: a step of the program on the target."""
    title = (
        f"{found.step} on {target.name}, predicted and not measured: {in_seconds(found.seconds)} in {found.launches} "
        f"launches, {in_bytes(found.bytes_moved)} ({found.bandwidth_share:.0%} of {target.bandwidth / 1e12:.2f} TB/s), "
        f"{found.flops / 1e12:.3g} TFLOP ({found.peak_share:.0%} of the matrix peak)"
    )
    figures = numeric(("threads", 6), ("registers", 2), ("spills", 1), ("shared", 3), ("bytes", 4), "predicted")
    table = FittingTable(title, (Column("kernel"), Column("for", rank=5), *figures))
    launched = {launch.kernel for launch in program.launches}
    for kernel in program.kernels:
        seconds = found.kernel_seconds.get(kernel.name)
        predicted = "other steps" if seconds is None else in_seconds(seconds)
        costs = in_bytes(found.kernel_bytes.get(kernel.name, 0.0)), predicted
        if kernel.is_library and kernel.name in launched:
            table.add_row(kernel.name, "library", "", "", "", "", *costs)
        for arch, binary in kernel.binaries.items():
            sizes = (binary.threads, binary.registers, binary.spill_bytes)
            table.add_row(kernel.name, arch, *map(str, sizes), in_bytes(binary.shared_bytes), *costs)
    return table


def candidates(program: Program, target: GpuTarget) -> FittingTable:
    """Each choice among ways to compute one node, alike ones once: predicted times, the chosen one first."""
    columns = (
        Column("for", rank=3, wraps=True),
        Column("rows", rank=1),
        Column("chosen"),
        Column("predicted", right=True),
        Column("others", rank=2, wraps=True),
    )
    table = FittingTable(f"choices for {target.name}; `llmc tune` measures them", columns)
    sites: dict[tuple[int, int], list[Launch]] = defaultdict(list)
    for alternative in program.alternatives:
        sites[alternative.first, alternative.last].append(_leader(alternative.launches))
    for (first, last), others in sites.items():
        chosen = _leader(program.launches[first : last + 1])
        only = chosen.only
        rows = "all" if only is None else f"{only.rows.value} {only.first} to {only.last or 'the most'}"
        named = [f"{x.kernel} {in_seconds(x.seconds)}" for x in others if x.seconds is not None]
        predicted = "" if chosen.seconds is None else in_seconds(chosen.seconds)
        table.add_row(", ".join(chosen.origin.nodes), rows, chosen.kernel, predicted, ", ".join(named))
    return table


def _leader(launches: tuple[Launch, ...]) -> Launch:
    """The launch that does the work, which has the predicted time of all."""
    return next((launch for launch in launches if launch.seconds is not None), launches[0])
