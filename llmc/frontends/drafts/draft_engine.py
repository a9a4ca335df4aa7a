"""The build options of a drafter's engine, derived from those of the enclosing engine."""

import numpy as np
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.graph.model_graph import ModelInfo
from llmc.options import BuildOptions
from llmc.program import Limits


def draft_options(options: BuildOptions, limits: Limits) -> tuple[BuildOptions, tuple[str, ...]]:
    """Return the options that build the draft, and notes for the build to print. limits: the limits of the engine that
    it drafts for.

    Its weights are quantized and made sparse alike, unless that needs text to calibrate on: a draft reads hidden
    states. For the same reason it is not pruned.
    """
    changes: dict[str, object] = {"speculative": None, "prune": (), "stop_after": None}
    changes["max_model_len"] = limits.max_model_len
    notes: tuple[str, ...] = ()
    for name, schemes, texts, left in (
        ("quantize", options.quantization, options.quantize, "are not quantized"),
        ("sparsity", options.zeros, options.sparsity, "stay dense"),
    ):
        if schemes.needs_calibration:
            changes |= {name: (), "calibration": None}
            why = f"{', '.join(texts)} calibrates on text, and a draft reads no text"
            notes += (f"the draft's own weights {left}: {why}",)
    return options.model_copy(update=changes), notes


def target_ids(offsets: Tensor, info: ModelInfo) -> bytes:
    """The target's token ids of a draft's vocabulary, int32. offsets: what is to be added to the draft's own."""
    ids = offsets.to("cpu").numpy().astype(np.int64) + np.arange(len(offsets))
    beyond = ids[(ids < 0) | (ids >= info.vocab_size)]
    if len(beyond) or len(np.unique(ids)) < len(ids):
        seen = f"token {beyond[0]}" if len(beyond) else "a token twice"
        raise CheckpointError(
            f"the draft's d2t names {seen}, and {info.name} has {info.vocab_size} tokens",
            at="d2t",
            fix="take the draft that was trained for this model",
        )
    return ids.astype("<i4").tobytes()
