"""The size of the KV cache, in words."""

from llmc.cli.units import in_bytes
from llmc.program import Program


def cache_text(program: Program) -> str:
    """`2.0 kB per token, 1.0 kB of it kept by nearest:window=512`."""
    whole, *groups = program.token_bytes()
    parts = (
        f", {in_bytes(nbytes)} of it kept by {policy.shown}"
        for nbytes, policy in zip(groups, program.policies, strict=True)
    )
    return f"{in_bytes(whole + sum(groups))} per token{''.join(parts)}"
