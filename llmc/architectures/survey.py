"""Build a tiny model of an architecture and compare it with transformers: how far it gets, and why not farther."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmc.architectures.tiny_config import tiny_architecture
from llmc.compiler import build
from llmc.errors import LlmcError
from llmc.files.scratch_directory import ScratchDirectory
from llmc.runtime.loading import load

# Largest |Δlogit| over the logits' standard deviation: what re-ordered fp32 sums may cost.
TOLERANCE = 1e-3
LENGTH = 33


class Verdict(Enum):
    """The outcome for an architecture."""

    MATCHES = "matches"
    DIFFERS = "differs"
    REFUSED = "refused"
    # transformers cannot make a small model of it, or cannot run that model.
    NO_MODEL = "no tiny model"
    # Neither an engine nor a refusal: a fault of llmc.
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """The result of one architecture. difference: max |Δlogit| over the spread of the logits, if an engine was built.
    reason: Why none was built.

    kv_bytes: KV cache bytes per token. state_bytes: Bytes of states per sequence. Both are of the tiny model in fp32.
    """

    model_type: str
    class_name: str
    verdict: Verdict
    difference: float | None = None
    reason: str | None = None
    kv_bytes: int | None = None
    state_bytes: int | None = None


def survey(model_type: str, class_name: str, target: str) -> Outcome:
    """Build a tiny fp32 model for `target` and compare its logits at 33 tokens with transformers'.

    For a multimodal model, the text half is built and compared with the whole model on token inputs.
    """

    def outcome(verdict: Verdict, reason: str) -> Outcome:
        return Outcome(model_type, class_name, verdict, reason=reason)

    tokens = [(7 + 37 * i + i * i) % 150 + 3 for i in range(LENGTH)]
    try:
        model = tiny_architecture(model_type)
    except Exception as error:  # transformers raises whatever its own code meets.
        return outcome(Verdict.NO_MODEL, _one_line(error))
    try:
        logits, memory = _built(model, tokens, target)
    except LlmcError as error:
        return outcome(Verdict.REFUSED, error.problem if error.at is None else f"{error.problem} ({error.at})")
    except Exception as error:  # Said to be a fault, so that it is seen.
        return outcome(Verdict.FAILED, _one_line(error))
    try:
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
    except Exception as error:  # As above: its forward is also its own code.
        return outcome(Verdict.NO_MODEL, _one_line(error))
    difference = float(np.abs(logits - expected).max() / expected.std())
    return Outcome(
        model_type,
        class_name,
        Verdict.MATCHES if difference <= TOLERANCE else Verdict.DIFFERS,
        difference,
        kv_bytes=memory["kv_per_token"],
        state_bytes=memory["states_per_sequence"],
    )


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain data."""
    return {**asdict(outcome), "verdict": outcome.verdict.value}


def _built(model: Any, tokens: list[int], target: str) -> tuple[NDArray[np.float32], Mapping[str, int]]:
    """The engine's logits, and the memory of its manifest."""
    with ScratchDirectory() as directory:
        path = directory / "engine.llmc"
        build(model, path, target=target, dtype="float32", max_model_len=64)
        with load(path) as engine:
            return engine.logits(tokens), engine.manifest.memory


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
