"""The lines of `llmc explain` about a model that is split over several ranks."""

from collections.abc import Iterator, Mapping

from llmc.plural import counted
from llmc.report.explanation import RankExplanation
from llmc.report.placements.hf_plan import agreement, beside
from llmc.report.placements.record import PlacedCollective, PlacedWeight, Placements, StageRanks


def placement_lines(ranks: RankExplanation) -> Iterator[tuple[str, str]]:
    """(style, text) of each line: weights that are cut, what is whole, what ranks exchange, and the memory of one in
    each stage."""
    placements, stages, plan = ranks.placements, ranks.stages, ranks.plan
    in_stages = f" in {counted(len(stages), 'stage')}" if len(stages) > 1 else ""
    yield "bold", f"on {counted(placements.ranks * len(stages), 'rank')}{in_stages}"
    if placements.ranks > 1:
        yield from _placements(placements, plan)
    for number, stage in enumerate(stages):
        yield "", f"  {stage_text(stage, number if len(stages) > 1 else None)}"
    if placements.ranks > 1 and plan:
        count, alike = agreement(placements.weights, plan)
        yield (
            "",
            f"  compared with Hugging Face's plan:  {alike} of {counted(count, 'weight')} are split alike",
        )


def _placements(placements: Placements, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield "", "  cut"
    yield from (line for weight in placements.weights if weight.axis is not None for line in _weight(weight, plan))
    yield "", "  whole on every rank"
    yield from (line for weight in placements.weights if weight.axis is None for line in _weight(weight, plan))
    yield "", "  exchanged"
    for collective in placements.collectives:
        yield "", f"    {_times(collective.count)}{collective_text(collective)}"
    total = sum(entry.count * entry.token_bytes for entry in placements.collectives)
    count = sum(entry.count for entry in placements.collectives)
    yield "", f"    {counted(total, 'byte')} per token in {counted(count, 'collective')}"


def _weight(weight: PlacedWeight, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    sizes = " × ".join(map(str, weight.shape))
    cut = "" if weight.axis is None else f": {part_text(weight)}"
    yield "", f"    {_times(weight.count)}{weight.name} [{sizes}]{cut}"
    yield "", f"        {weight.why}; {counted(weight.nbytes, 'byte')} on a rank"
    compared = beside(weight, plan)
    if compared is not None and len(weight.shape) > 1:
        is_same = compared == "same"
        yield "green" if is_same else "yellow", f"        {'✓' if is_same else '≠'} Hugging Face: {compared}"


def part_text(weight: PlacedWeight) -> str:
    """`rows, 1024 a rank`: which axis is cut into which parts."""
    parts = sorted(set(weight.parts), reverse=True)
    axis = "elements" if len(weight.shape) == 1 else ("rows", "columns")[weight.axis or 0]
    padded = f", padded to {weight.length}" if max(parts) < weight.length else ""
    return f"{axis}, {' or '.join(map(str, parts))} a rank{padded}"


def stage_text(stage: StageRanks, number: int | None) -> str:
    """`stage 0, ranks 0–1: memory per rank: …; 1024 bytes per token handed over`. number: None if there is one
    stage."""
    memory = stage.memory
    within = f", {memory.kv_less} of them in layers that do not keep everything" if memory.kv_less else ""
    text = (
        f"memory per rank: weights {memory.weights / 1e9:.3f} GB, KV cache {memory.kv_token} bytes per token{within}, "
        f"arena {memory.arena / 1e6:.1f} MB"
    )
    if number is None:
        return text
    ranks = f"rank {stage.first}" if stage.first == stage.last else f"ranks {stage.first}–{stage.last}"
    distributive = "" if stage.first == stage.last else "each "
    handed = f"; {distributive}hands over {counted(stage.token_bytes, 'byte')} per token" if stage.token_bytes else ""
    return f"stage {number}, {ranks}: {text}{handed}"


def collective_text(collective: PlacedCollective) -> str:
    """`all_reduce of linear with …: 16384 bytes per token`."""
    whole = f"{collective.op} of {collective.of}: {counted(collective.token_bytes, 'byte')} per token"
    return (
        whole
        if collective.chosen_bytes is None
        else f"{whole}; on CPUs {collective.chosen_bytes} where only tokens are needed"
    )


def _times(count: int) -> str:
    return f"{count} × " if count > 1 else ""
