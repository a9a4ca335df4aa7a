"""What compiled code takes for granted of the memory that it is given, as text that the code itself carries.

A CPU engine's library is compiled for one program. Whoever opens it compares: memory laid out by another program would
be read and written beyond its end.
"""

from __future__ import annotations

from dataclasses import asdict

from llmc.program import Affine, Program


def interface_text(program: Program) -> str:
    """One fact a line: the limits, the arena, every weight and cache in the order of their pointers, the launches."""
    limits = program.limits
    lines = [
        f"limits {' '.join(f'{name}={value}' for name, value in asdict(limits).items())}",
        f"vocabulary {program.vocab_size}",
        f"arena {_affine(program.arena)}",
    ]
    lines += [f"weight {i} {w.name} {w.dtype} {w.layout.value} {w.nbytes}" for i, w in enumerate(program.weights)]
    for index, cache in enumerate(program.caches):
        keys, values = cache.key_and_value_bytes(limits.block_size)
        lines.append(f"cache {index} {keys}+{values} bytes a block")
    lines.append(f"launches {len(program.launches)}")
    return "".join(f"{line}\n" for line in lines)


def first_difference(expected: str, found: str) -> tuple[str, str] | None:
    """The first line that differs between two such texts, of each; None if they are equal."""
    ours, theirs = expected.splitlines(), found.splitlines()
    for index in range(max(len(ours), len(theirs))):
        pair = tuple(lines[index] if index < len(lines) else "nothing" for lines in (ours, theirs))
        if pair[0] != pair[1]:
            return pair[0], pair[1]
    return None


def _affine(affine: Affine) -> str:
    return f"{affine.constant} + {affine.tokens} T + {affine.logit_rows} L"
