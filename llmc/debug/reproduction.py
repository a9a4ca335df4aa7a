"""A directory that shows one wrong rewrite by itself: the small graphs, their inputs, and a script to run.

README.md            what was found, and how to see it
repro.py             `python repro.py`: the graph's piece before and after the rewrite on the saved inputs
inputs.safetensors   what goes into it, taken from a run on real tokens
before.txt after.txt the piece as text; graphs/ has the whole graphs
check.sh             the check again, on the whole model, with and without the rewrite
culprit.json         the finding as data
"""

import json
import shlex
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from llmc.debug.bisect import Culprit
from llmc.debug.difference import BUDGETS, Difference, difference
from llmc.debug.graph_source import function_source, rank_name
from llmc.debug.region import ChangedRegion, Region, run_region
from llmc.errors import OptionError, PassError
from llmc.files.storage_error import storage_error
from llmc.files.typed_json import to_json
from llmc.graph.model_graph import ModelGraph
from llmc.graph.ranks import OnRanks
from llmc.graph.render import render
from llmc.passes.rewrite import Numerics

_SCRIPT = '''"""{title}

Run it: python repro.py
It computes the piece of the graph that the rewrite changed, before and after it, on the same inputs, and exits with 1
if the results differ by more than rounding does. {source}
"""

import operator
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

import llmc.ops  # registers torch.ops.llmc
from llmc.graph.ranks import OnRanks, call  # of graphs that are cut for several ranks

ALLOWED = {allowed!r}  # of max |difference| over the standard deviation of the result before


{before}

{after}

def main() -> int:
    inputs = load_file(Path(__file__).parent / "inputs.safetensors")
    worst = 0.0
    with torch.inference_mode():
        wanted, found = before(inputs), after(inputs)
    for name, reference in wanted.items():
        if isinstance(reference, OnRanks) or isinstance(found[name], OnRanks):
            continue  # Each rank has a part.
        delta = (found[name].float() - reference.float()).abs()
        relative = float(delta.max() / reference.float().std().clamp_min(1e-30))
        worst = max(worst, relative) if relative == relative else float("inf")
        print(f"{{name}}: max {{float(delta.max()):.3e}}, mean {{float(delta.mean()):.3e}}, relative {{relative:.3e}}")
    print(f"allowed: {{ALLOWED:.0e}}:", "ok" if worst <= ALLOWED else "TOO LARGE")
    return 0 if worst <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
'''


@dataclass(frozen=True)
class Reproduction:
    """The files that reproduce a difference.

    directory: where they were written. local: the difference that the piece shows by itself, in the worst of its
    outputs; None if no piece runs, and error then says why.
    """

    directory: Path
    local: Difference | None
    error: str | None


def write_reproduction(
    directory: Path,
    culprit: Culprit,
    before: ModelGraph,
    after: ModelGraph | None,
    piece: ChangedRegion | None,
    check: Sequence[str],
) -> Reproduction:
    """Write the directory, which must not exist or be empty. after, piece: None if the rewrite does not get that
    far. check: the command line that repeats the check at this rewrite.

    Raises OptionError for a directory that holds something.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise OptionError("the directory is not empty", at=directory, fix="name another with --output, or remove it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        graphs = directory / "graphs"
        graphs.mkdir()
        (graphs / "before.txt").write_text(render(before), encoding="utf-8")
        if after is not None:
            (graphs / "after.txt").write_text(render(after), encoding="utf-8")
        local, error = None, None
        if piece is not None and after is not None:
            for name, graph, region in (("before", before, piece.before), ("after", after, piece.after)):
                (directory / f"{name}.txt").write_text(_region_text(graph, region), encoding="utf-8")
            save_file(dict(_saved(piece)), directory / "inputs.safetensors")
            allowed = BUDGETS[Numerics.EXACT, before.info.dtype]
            (directory / "repro.py").write_text(_script(culprit, piece, allowed), encoding="utf-8")
            try:
                local = _local(piece)
            except PassError as problem:
                error = problem.problem
        script = directory / "check.sh"
        script.write_text(
            f"#!/bin/sh\n# The check, with and without rewrite #{culprit.bad}.\n"
            f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(check)}\n"
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        data = to_json(culprit) | {"local": None if local is None else to_json(local), "local_error": error}
        (directory / "culprit.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        reproduction = Reproduction(directory, local, error)
        (directory / "README.md").write_text(_readme(culprit, reproduction, piece is not None), encoding="utf-8")
        return reproduction
    except OSError as failure:
        raise storage_error(failure, directory) from None


def title(culprit: Culprit) -> str:
    """The finding in one line."""
    if culprit.rewrite is None:
        return f"pass {culprit.pass_name} fails before it has made a rewrite"
    return f"rewrite #{culprit.bad} of pass {culprit.pass_name}: {culprit.rewrite.description}"


def _script(culprit: Culprit, piece: ChangedRegion, allowed: float) -> str:
    source = culprit.rewrite.source if culprit.rewrite is not None else None
    return _SCRIPT.format(
        title=title(culprit).replace("\\", "/").replace('"', "'"),
        source="" if source is None else "\n\nThe model's line: " + source.replace("\\", "/").replace('"', "'"),
        allowed=allowed,
        before=function_source("before", piece.before, piece.inputs),
        after=function_source("after", piece.after, piece.inputs),
    )


def _saved(piece: ChangedRegion) -> Iterator[tuple[str, Tensor]]:
    """The tensors that go in, by name; of each rank where they differ."""
    for name, value in piece.inputs.items():
        if isinstance(value, OnRanks):
            yield from ((rank_name(name, rank), shard.contiguous().clone()) for rank, shard in enumerate(value.values))
        elif isinstance(value, Tensor):
            yield name, value.contiguous().clone()


def _local(piece: ChangedRegion) -> Difference:
    wanted, actual = run_region(piece.before, piece.inputs), run_region(piece.after, piece.inputs)
    differences = [difference(_rows(actual[name]), _rows(wanted[name])) for name in wanted if name in actual]
    if not differences:
        raise PassError("each rank has only a part of every output")
    return max(differences, key=lambda d: d.relative if d.relative == d.relative else float("inf"))


def _rows(value: Tensor) -> Tensor:
    return value.float().reshape(-1, value.shape[-1]) if value.dim() else value.float().reshape(1, 1)


def _region_text(graph: ModelGraph, region: Region) -> str:
    """The lines of the graph's text for the region and its inputs."""
    shown = {n.name for n in (*region.inputs(), *region.nodes)}
    lines = [line for line in render(graph).splitlines() if line.partition(":")[0].lstrip("%") in shown]
    outputs = ", ".join(f"%{node.name}" for _, node in region.outputs)
    return "\n".join([*lines, f"return {outputs}"]) + "\n"


def _readme(culprit: Culprit, reproduction: Reproduction, has_piece: bool) -> str:
    rewrite = culprit.rewrite
    lines = [
        f"# {title(culprit)}",
        "",
        f"* with rewrites 1 to {culprit.good} the check holds; with #{culprit.bad} it fails: {culprit.outcome.detail}",
        f"* the pass declares its numerics as {culprit.numerics}",
    ]
    if rewrite is not None:
        lines.append(f"* it is about {', '.join(rewrite.nodes) or 'the whole graph'}")
        if rewrite.made:
            lines.append(f"* it made {', '.join(rewrite.made)}")
        if rewrite.source is not None:
            lines.append(f"* the model's line: `{rewrite.source}`")
    lines.append(f"* found in {len(culprit.probes)} runs of the check")
    if has_piece:
        lines += ["", "`python repro.py` computes what the rewrite changed, before and after, on saved inputs."]
        if reproduction.error is not None:
            lines.append(f"After the rewrite it does not run: {reproduction.error}")
        elif reproduction.local is not None:
            lines.append(f"Seen when this was written: relative difference {reproduction.local.relative:.1e}.")
    lines += ["", "`./check.sh` repeats the check on the whole model with and without this rewrite.", ""]
    return "\n".join(lines)
