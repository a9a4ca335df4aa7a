"""What steps read and what they are to give: tokens or logits, and side outputs."""

from collections.abc import Collection
from enum import Enum


class StepOutput(Enum):
    """What a step is to give for its logit rows: the logits, or a token each, chosen where the logits are.

    BEST: the likeliest. DRAWN: the likeliest, or a draw from all tokens. FILTERED: those, or a draw from what top-k,
    top-p and min-p keep.
    """

    LOGITS = "logits"
    BEST = "best"
    DRAWN = "drawn"
    FILTERED = "filtered"


# What a model knew after each token: a side output of targets, and of drafts, which also read it as a step input,
# [T, hidden_width] in F32.
HIDDEN = "hidden"
# Of an ONNX model: what it returns first, and what a cache is called after the step beside what it is before.
LOGITS = "logits"
WRITTEN = "_written"
# Which adapter each token has, and each wanted row, in I32: step inputs of engines that take adapters.
ADAPTERS, ROW_ADAPTERS = "adapter_of_token", "adapter_of_logit_row"
# What else steps read, hidden states only for drafts: dtypes by name; what they count stands in runtime/loop/step.py.
STEP_INPUTS = {
    "input_ids": "I32",
    "positions": "I32",
    "slot_mapping": "I32",
    "query_starts": "I32",
    "context_lens": "I32",
    "block_tables": "I32",
    "logit_rows": "I32",
    "tree_masks": "I64",
    HIDDEN: "F32",
}
# The step inputs that a group of caches (CacheSlot.group) may have for itself; see CachePolicy.inputs.
GROUP_INPUTS = ("slot_mapping", "block_tables", "context_lens")
# A request's rows that are to be chosen, in I32, of engines with a policy that scores them: llmc/ops/compact_kv.py says
# how. A step that has it does that and nothing else.
COMPACTION = "compaction"
# Where each request's states are, [R] in I32: a step input of models that have states.
STATE_SLOTS = "state_slots"
# What choosing reads for each logit row beside the step's inputs, and what a step can leave for it: dtypes by name.
CHOICE_INPUTS = {
    "temperature": "F32",
    "top_k": "I32",
    "top_p": "F32",
    "min_p": "F32",
    "seeds": "I32",
    "counters": "I32",
}
CHOICE_OUTPUTS = {"tokens": "I32", "scores": "F32", "covered": "I32"}
# The side outputs of an engine with draft heads: for each logit row [heads, CANDIDATES].
DRAFT_IDS, DRAFT_LOGPROBS = "draft_ids", "draft_logprobs"
# The likeliest tokens of each head that leave the device.
CANDIDATES = 10


def group_input(name: str, group: int) -> str:
    """What one of GROUP_INPUTS is called that belongs to a group of caches."""
    return f"{name}_{group}" if group else name


def is_for(sides: tuple[str, ...], unless: tuple[str, ...], wanted: Collection[str]) -> bool:
    """Whether a launch with these `sides` and `unless` runs in a step that wants these side outputs."""
    return (not sides or any(name in wanted for name in sides)) and not any(name in wanted for name in unless)
