"""What the KV cache takes, in words."""

from llmc.cli.units import in_bytes
from llmc.program import Program


def cache_text(program: Program) -> str:
    """`2.0 kB a token, 1.0 kB of it only within window 512`."""
    whole, *windows = program.token_bytes()
    parts = (
        f", {in_bytes(each)} of it only within {reach}" for each, reach in zip(windows, program.reaches, strict=True)
    )
    return f"{in_bytes(whole + sum(windows))} a token{''.join(parts)}"
