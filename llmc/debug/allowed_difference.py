"""The tolerated difference between the logits of a correct engine and those of the fp32 model, by dtype and
quantization."""

from dataclasses import dataclass

from llmc.debug.compare import Comparison
from llmc.debug.difference import BUDGETS
from llmc.engine_format import Manifest
from llmc.graph.dtype_names import NAMED_DTYPES
from llmc.passes.pipeline import default
from llmc.passes.rewrite import Numerics

# Without a yardstick. fp32 against fp32 differs only by the order of sums; bf16 rounds weights' products and
# activations to 8 bits, fp16 to 11.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
# Two roundings to 16 bits, in other orders, are seldom further apart than one is from fp32.
TIMES_OWN = 2.0


@dataclass(frozen=True)
class Allowed:
    """Over the spread of the logits: largest, and of the token in the middle. why: in words for a table."""

    largest: float
    in_the_middle: float
    why: str


def allowed_difference(manifest: Manifest, own: Comparison | None) -> Allowed:
    """Return the difference that an engine may have from Hugging Face, and the reason for it.

    own: Hugging Face in the engine's dtype against itself in fp32; None if that was not measured.
    """
    lossy, dtype = lossy_budget(manifest), manifest.model.dtype
    because = "" if lossy is None else f"; {lossy[0]} may cost {lossy[1]:g}"
    more = 0.0 if lossy is None else lossy[1]
    if own is None:
        usual = TOLERANCE[dtype] + more
        return Allowed(usual, usual, f"{dtype}{because}")
    largest, middle = (TIMES_OWN * value + more for value in (own.relative_difference, own.relative_in_the_middle))
    return Allowed(largest, middle, f"{TIMES_OWN:g} × Hugging Face's own in {dtype}{because}")


def lossy_budget(manifest: Manifest) -> tuple[str, float] | None:
    """The pass that rounds on purpose and may cost most of those that changed the engine, with its budget."""
    known = {pass_.name: pass_ for pass_ in default()}
    usual = BUDGETS[Numerics.LOSSY, NAMED_DTYPES[manifest.model.dtype]]
    budgets = [
        (record.name, getattr(known[record.name], "budget", None) or usual)
        for record in manifest.passes
        if record.rewrites and record.name in known and known[record.name].numerics is Numerics.LOSSY
    ]
    return max(budgets, key=lambda named: named[1], default=None)
