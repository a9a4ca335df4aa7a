"""Inputs and outputs of steps: tokens or logits, and side outputs."""

from collections.abc import Collection
from enum import Enum


class StepOutput(Enum):
    """The output of a step per logit row: the logits, or a token chosen on the device.

    BEST: the likeliest token. DRAWN: the likeliest, or a draw from all tokens. FILTERED: these, or a draw from the
    tokens that top-k, top-p and min-p keep.
    """

    LOGITS = "logits"
    BEST = "best"
    DRAWN = "drawn"
    FILTERED = "filtered"


# The hidden states after each token: a side output of targets and drafters. Drafters also read them as a step input,
# [T, hidden_width] in F32.
HIDDEN = "hidden"
# Names in an ONNX model: its first output, and the prefix of a cache after the step, by that before the step.
LOGITS = "logits"
WRITTEN = "_written"
# Which adapter each token has, and each wanted row, in I32: step inputs of engines that take adapters.
ADAPTERS, ROW_ADAPTERS = "adapter_of_token", "adapter_of_logit_row"
# Further step inputs by name, with their dtypes; hidden states are read by drafters only. runtime/loop/step.py
# documents them.
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
# The step inputs that a group of caches (CacheSlot.group) may have in addition; see CachePolicy.inputs.
GROUP_INPUTS = ("slot_mapping", "block_tables", "context_lens")
# A request's rows that are to be chosen, in I32, of engines with a policy that scores them: llmc/ops/compact_kv.py says
# how. A step that has it does that and nothing else.
COMPACTION = "compaction"
# Numbers of a compaction before its blocks.
COMPACTION_HEADER = 5
# Where each request's states are, [R] in I32: a step input of models that have states.
STATE_SLOTS = "state_slots"
# Inputs of token choice per logit row, in addition to the step's inputs, and its outputs: dtypes by name.
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
    """The name of one of GROUP_INPUTS for a cache group."""
    return f"{name}_{group}" if group else name


def is_for(sides: tuple[str, ...], unless: tuple[str, ...], wanted: Collection[str]) -> bool:
    """Whether a launch with these `sides` and `unless` runs in a step that needs these side outputs."""
    return (not sides or any(name in wanted for name in sides)) and not any(name in wanted for name in unless)
