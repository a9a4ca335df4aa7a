"""Put alternatives in the place of the launches that they can stand for, in every site that is alike."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmc.codegen.launches import alike, plan_buffers, spans_of
from llmc.program import Alternative, Buffer, Launch, Program
from llmc.program.launch_arguments import Argument, Operand


def launch_alternatives(program: Program, chosen: Sequence[Alternative]) -> Program:
    """The program with those of its alternatives launched, at most one for a site, and with a new memory plan.

    The replaced launches become alternatives.
    """
    replaced: dict[int, tuple[int, tuple[Launch, ...]]] = {}
    known = {b.name: b for b in (*program.buffers, *(b for a in program.alternatives for b in a.buffers))}
    for alternative in chosen:
        own = program.launches[alternative.first : alternative.last + 1]
        for start in _sites(program.launches, own):
            current = program.launches[start : start + len(own)]
            # One buffer for all sites would be in use from the first to the last of them.
            names = {
                b.name: f"{b.name}_at_{start}" if start != alternative.first else b.name for b in alternative.buffers
            }
            known |= {name: replace(known[old], name=name) for old, name in names.items()}
            replaced[start] = len(own), _moved(alternative.launches, own, current, names)
    launches: list[Launch] = []
    places: dict[int, int] = {}
    index = 0
    while index < len(program.launches):
        places[index] = len(launches)
        count, new = replaced.get(index, (1, program.launches[index : index + 1]))
        launches += new
        index += count
    return _planned(program, launches, _alternatives(program, chosen, places), known)


def with_every_buffer(program: Program) -> Program:
    """The program with room for its alternatives too, each at its site: for measuring them."""
    unplaced = {buffer.name: buffer for buffer in program.buffers}
    for alternative in program.alternatives:
        for buffer in alternative.buffers:
            other = unplaced.get(buffer.name, buffer)
            first, last = min(alternative.first, other.first_launch), max(alternative.last, other.last_launch)
            unplaced[buffer.name] = replace(buffer, first_launch=first, last_launch=last)
    buffers, plan = plan_buffers(list(unplaced.values()))
    return replace(program, buffers=buffers, arena=plan.arena, unplanned_arena=plan.unplanned)


def _sites(launches: Sequence[Launch], own: Sequence[Launch]) -> list[int]:
    """Return the indices at which launches equal `own` except for their operands."""
    key, count = alike(own), len(own)
    return [
        i
        for i in range(len(launches) - count + 1)
        if launches[i].kernel == own[0].kernel and alike(launches[i : i + count]) == key
    ]


def _moved(
    launches: Sequence[Launch], own: Sequence[Launch], current: Sequence[Launch], names: Mapping[str, str]
) -> tuple[Launch, ...]:
    """The launches with the operands of `own` replaced by those of `current` in their place, and buffers renamed."""
    operands = {
        value: theirs.arguments[name]
        for ours, theirs in zip(own, current, strict=True)
        for name, value in ours.arguments.items()
        if isinstance(value, Operand)
    }

    def moved(value: Argument) -> Argument:
        if not isinstance(value, Operand):
            return value
        if value.space == "buffer" and value.name in names:
            return replace(value, name=names[value.name])
        return operands.get(value, value)

    return tuple(
        replace(launch, arguments={n: moved(v) for n, v in launch.arguments.items()}, origin=current[0].origin)
        for launch in launches
    )


def _alternatives(program: Program, chosen: Sequence[Alternative], places: dict[int, int]) -> list[Alternative]:
    """The alternatives at their sites' new places; a chosen one gives way to what it replaces."""
    alternatives = []
    for alternative in program.alternatives:
        own = program.launches[alternative.first : alternative.last + 1]
        winner = next((c for c in chosen if (c.first, c.last) == (alternative.first, alternative.last)), None)
        count = len(own) if winner is None else len(winner.launches)
        first = places[alternative.first]
        launches = own if winner is alternative else alternative.launches
        alternatives.append(Alternative(first, first + count - 1, launches, ()))
    return alternatives


def _planned(
    program: Program, launches: list[Launch], alternatives: list[Alternative], known: dict[str, Buffer]
) -> Program:
    used = spans_of(launches)
    unplaced = [replace(known[n], first_launch=first, last_launch=last) for n, (first, last) in used.items()]
    buffers, plan = plan_buffers(unplaced)
    kept = tuple(
        replace(a, buffers=tuple(known[n] for n in spans_of(a.launches) if n not in used)) for a in alternatives
    )
    return replace(
        program,
        launches=tuple(launches),
        buffers=buffers,
        arena=plan.arena,
        unplanned_arena=plan.unplanned,
        alternatives=kept,
    )
