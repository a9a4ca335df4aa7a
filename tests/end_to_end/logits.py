"""Comparing engines with the torch models they were made from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tests.tolerances import ENGINES

GENERATED = 256

Logits = npt.NDArray[np.float32]


def random_tokens(vocab_size: int, length: int) -> list[int]:
    """Token ids drawn evenly, the same ones for the same length."""
    return [int(token) for token in np.random.default_rng(length).integers(0, vocab_size, length)]


def torch_logits(model: nn.Module, tokens: list[int]) -> Logits:
    """The model's logits [tokens, vocabulary] in fp32; the model returns them, or a tuple or object with them."""
    with torch.inference_mode():
        output = model(torch.tensor([tokens]))
    if isinstance(output, tuple):
        output = output[0]
    logits = output if isinstance(output, torch.Tensor) else output.logits
    result: Logits = logits[0].float().numpy()
    return result


def assert_close(ours: Logits, theirs: Logits) -> None:
    """Equal within the tolerance of engines."""
    assert ours.shape == theirs.shape
    difference = float(np.abs(ours - theirs).max() / theirs.std())
    assert difference <= ENGINES, f"max |Δlogit| is {difference:.2e} of the spread"


def assert_greedy(model: nn.Module, prompt: list[int], generated: list[int]) -> None:
    """Each generated token is the model's argmax after the tokens before it: one teacher-forced pass shows it."""
    assert len(generated) == GENERATED
    logits = torch_logits(model, prompt + generated)[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == generated
