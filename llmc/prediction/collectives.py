"""How long a collective of a program takes, over what joins its ranks."""

from llmc.prediction.cost_expression import evaluate_expression
from llmc.prediction.step_shape import StepShape
from llmc.program import Launch
from llmc.targets.links import Link

ALL_REDUCE, ALL_GATHER, CHOOSE_ACROSS = "all_reduce", "all_gather", "choose_across"
# Bytes that a rank sends per row of logits: its likeliest token and the logit; a sampled row takes a second round.
CANDIDATE_BYTES = 8


def is_collective(launch: Launch) -> bool:
    """Whether ranks talk to each other in it."""
    return launch.family in (ALL_REDUCE, ALL_GATHER, CHOOSE_ACROSS)


def collective_bytes(launch: Launch, step: StepShape, ranks: int) -> float:
    """Bytes of the result that every rank receives. A collective reads its own part and writes the whole, except the
    one that chooses tokens, which reads logits and writes very little."""
    if launch.family == CHOOSE_ACROSS:
        return float(CANDIDATE_BYTES * ranks * step.logit_rows)
    moved = evaluate_expression(launch.bytes_moved, step.values())
    return moved / 2 if launch.family == ALL_REDUCE else moved * ranks / (ranks + 1)


def collective_seconds(launch: Launch, step: StepShape, ranks: int, link: Link, *, custom: bool = True) -> float:
    """Seconds on the link. custom: see Link.all_reduce."""
    nbytes = collective_bytes(launch, step, ranks)
    if launch.family == ALL_REDUCE:
        return link.all_reduce(nbytes, ranks, custom=custom)
    return link.all_gather(nbytes, ranks, custom=custom)
