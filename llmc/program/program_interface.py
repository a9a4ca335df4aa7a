"""The memory layout that an engine's code assumes, as text that the code itself contains.

A CPU engine's library and a reference engine's graph are made for one program. Opening an engine compares the text,
because memory laid out for another program would be accessed out of bounds.
"""

from dataclasses import asdict
from pathlib import Path

from llmc.errors import EngineFormatError
from llmc.program.engine_structs import structs_text
from llmc.program.program import Affine, Program


def memory_text(program: Program) -> str:
    """Return a line per fact: the limits, and every weight and cache in order."""
    lines = [
        f"limits {' '.join(f'{name}={value}' for name, value in asdict(program.limits).items())}",
        f"vocabulary {program.vocab_size}",
    ]
    if program.layout.tensor > 1:
        lines.append(f"ranks {program.layout.tensor}")
    if program.hidden_width:
        lines.append(f"hidden states {program.hidden_width}")
    if program.layout.pipeline > 1:
        lines.append(f"stage {program.stage} of {program.layout.pipeline} hands over {program.hands_over}")
    for index, w in enumerate(program.weights):
        lines.append(f"weight {index} {w.name} {w.dtype} {list(w.shape)} {w.layout.value} {w.nbytes}")
    for index, c in enumerate(program.caches):
        group = f" group {c.group}" if c.group else ""
        lines.append(f"cache {index} {c.kv_heads} heads of {c.head_dim} and {c.value_dim} {c.dtype} {c.format}{group}")
    if program.adapters is not None:
        pools = program.adapters
        for index in range(len(pools.products)):
            shapes = " ".join(f"{name} {list(shape)}" for name, shape in pools.shapes(index).items())
            lines.append(f"adapters {pools.products[index].dtype} {shapes}")
    for index, state in enumerate(program.states):
        lines.append(f"state {index} {list(state.shape)}")
    for side in program.side_outputs:
        lines.append(f"side output {side.name} {side.dtype} {side.rows.value} × {list(side.shape)}")
    return "".join(f"{line}\n" for line in lines)


def interface_text(program: Program) -> str:
    """The same, and what else a compiled library assumes: the arena, how many launches it may time, and its structs."""
    return f"{memory_text(program)}arena {_affine(program.arena)}\nlaunches {len(program.launches)}\n{structs_text()}"


def check_interface(expected: str, found: str, at: Path) -> None:
    """Compare the program's text with the code's. Raises EngineFormatError that names the first line that differs."""
    if expected == found:
        return
    ours, theirs = expected.splitlines(), found.splitlines()
    different = [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]]
    one, other = different[0] if different else (f"{len(ours)} lines", f"{len(theirs)} lines")
    raise EngineFormatError(
        f"the program and this file are of different engines: the program has {one!r:.200}, the file was made for "
        f"{other!r:.200}",
        at=at,
        fix="copy the whole engine again, or rebuild it: llmc build MODEL -o ENGINE",
    )


def _affine(affine: Affine) -> str:
    return f"{affine.constant} + {affine.tokens} T + {affine.logit_rows} L"
