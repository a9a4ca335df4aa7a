"""Compare an engine's logits with the original model's: the measure behind `llmc verify` and the tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llmc.errors import CheckpointError

Logits = npt.NDArray[np.float32]
# Token ids of one sequence → logits [tokens, vocabulary], fp32.
LogitFunction = Callable[[Sequence[int]], Logits]


@dataclass(frozen=True)
class Comparison:
    """How far two models' logits lie apart over the same tokens.

    spread: standard deviation of the reference's logits, the scale that the differences are read against.
    top1_agreement: share of positions with the same argmax. Perplexities: exp of the mean negative log-likelihood
    (natural) of each next token. middle_difference: the largest difference of the token that half of all exceed.
    """

    tokens: int
    max_difference: float
    middle_difference: float
    mean_difference: float
    spread: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float

    @property
    def relative_difference(self) -> float:
        """The largest difference over the spread."""
        return self.max_difference / self.spread

    @property
    def relative_in_the_middle(self) -> float:
        """The same of the token in the middle."""
        return self.middle_difference / self.spread


def compare(engine: LogitFunction, reference: LogitFunction, sequences: Sequence[Sequence[int]]) -> Comparison:
    """Run both over each sequence (at least two tokens each) and gather the differences, one sequence in memory."""
    count, positions, same = 0, 0, 0
    total, value_sum, square_sum = 0.0, 0.0, 0.0
    perplexity, reference_perplexity = Perplexity(), Perplexity()
    of_tokens: list[Logits] = []
    for tokens in sequences:
        ours = engine(tokens).astype(np.float64)
        theirs = reference(tokens).astype(np.float64)
        difference = np.abs(ours - theirs)
        of_tokens.append(difference.max(-1))
        total += float(difference.sum())
        value_sum += float(theirs.sum())
        square_sum += float(np.square(theirs).sum())
        count += theirs.size
        positions += len(tokens)
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        perplexity.add(ours, tokens)
        reference_perplexity.add(theirs, tokens)
    by_token = np.concatenate(of_tokens)
    variance = square_sum / count - (value_sum / count) ** 2
    return Comparison(
        tokens=positions,
        max_difference=float(np.max(by_token)),
        middle_difference=float(np.median(by_token)),
        mean_difference=total / count,
        spread=float(np.sqrt(variance)),
        top1_agreement=same / positions,
        perplexity=perplexity.value,
        reference_perplexity=reference_perplexity.value,
    )


class Perplexity:
    """exp of the mean negative log-likelihood of next tokens, gathered sequence by sequence. tokens: how many."""

    def __init__(self) -> None:
        self.tokens = 0
        self._total = 0.0

    def add(self, logits: Logits | npt.NDArray[np.float64], tokens: Sequence[int]) -> None:
        """Take in one sequence. logits: [tokens, vocabulary]."""
        self._total += negative_log_likelihood(logits.astype(np.float64, copy=False), tokens)
        self.tokens += len(tokens) - 1

    @property
    def value(self) -> float:
        """Of what was added so far."""
        return float(np.exp(self._total / self.tokens))


def negative_log_likelihood(logits: npt.NDArray[np.float64], tokens: Sequence[int]) -> float:
    """Sum over positions of -log p(next token), natural. logits: [tokens, vocabulary]."""
    scores = logits[:-1]
    top = scores.max(-1)
    log_sum = np.log(np.exp(scores - top[:, None]).sum(-1)) + top
    chosen = scores[np.arange(len(tokens) - 1), np.asarray(tokens[1:])]
    return float((log_sum - chosen).sum())


def hf_logits(directory: Path, dtype: str = "float32") -> LogitFunction:
    """The oracle: the Hugging Face model of a directory, eager on the CPU. dtype: float32 or bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    from llmc.graph.dtype_names import NAMED_DTYPES

    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{directory} has no config.json, so there is no model to compare with",
            at=directory,
            fix="name the Hugging Face directory that the engine was built from: --against MODEL",
        )
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=NAMED_DTYPES[dtype], attn_implementation="eager", local_files_only=True
    )
    model.train(False)

    def logits(tokens: Sequence[int]) -> Logits:
        with torch.inference_mode():
            result: Logits = model(torch.tensor([list(tokens)])).logits[0].float().numpy()
        return result

    return logits


def windows(tokens: Sequence[int], length: int, limit: int | None = None) -> list[list[int]]:
    """Consecutive windows of `length` tokens, at most `limit`; the last may be shorter, but has at least two."""
    pieces = [list(tokens[start : start + length]) for start in range(0, len(tokens), length)]
    pieces = [piece for piece in pieces if len(piece) >= 2]
    return pieces if limit is None else pieces[:limit]
