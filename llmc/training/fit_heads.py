"""Fit heads to the tokens that a model wrote, by its hidden states, and see how often they are right."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from llmc.passes.parallel_map import parallel_map
from llmc.training.engine_states import Rows
from llmc.training.medusa_heads import MedusaHeads

_BATCH = 256
# Negative samples: tokens that the model did not generate, drawn again for each batch.
_OTHERS = 2048
# Epochs without a lower loss before training stops.
_PATIENCE = 2
_RATE, _WARM_UP = 2e-3, 0.05


@dataclass(frozen=True)
class HeadAcceptance:
    """The acceptance of one head on held-out sequences: how often the model's token is the head's likeliest, and among
    its five likeliest."""

    top_1: float
    top_5: float


@dataclass(frozen=True)
class Samples:
    """Rows of all sequences. states: [rows, channels]. wanted: [rows, heads], the token that each head is about;
    is_known: [rows, heads], whether the sequence has it."""

    states: Tensor
    wanted: Tensor
    is_known: Tensor

    @staticmethod
    def of(rows: Sequence[Rows], heads: int) -> "Samples":
        """Head i of a row at one place is about the token i + 2 places on."""
        wanted, is_known = [], []
        for current in rows:
            places = torch.arange(len(current.states))[:, None] + 2 + torch.arange(heads)
            is_known.append(places < len(current.tokens))
            wanted.append(current.tokens[places.clamp_max(len(current.tokens) - 1)])
        return Samples(torch.cat([part.states for part in rows]), torch.cat(wanted), torch.cat(is_known))

    @property
    def batches(self) -> int:
        """The number of batches in an epoch."""
        return -(-len(self.states) // _BATCH)

    def known(self, chosen: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """States and tokens of the chosen rows whose token for this head is known."""
        chosen = chosen[self.is_known[chosen, head]]
        return self.states[chosen], self.wanted[chosen, head]


class _Vocabulary:
    """The tokens that a batch's loss is about: all that the model wrote, and some of the others, drawn for the batch.

    Products with the whole output matrix would take nearly all of the time: what a model writes in 10,000 tokens is
    a twentieth of 49,152. A drawn token represents several tokens, so its logit is increased by the logarithm of their
    number (sampled softmax; Jean et al. 2015). A small vocabulary is taken whole.
    """

    def __init__(self, matrix: Tensor, samples: Samples, order: torch.Generator) -> None:
        written = torch.zeros(len(matrix), dtype=torch.bool)
        written[samples.wanted[samples.is_known]] = True
        self._is_whole = int(written.sum()) + _OTHERS >= len(matrix)
        self._matrix, self._order = matrix, order
        self._written, self._others = written.nonzero()[:, 0], (~written).nonzero()[:, 0]
        self._rows = matrix if self._is_whole else matrix[self._written]
        self._place = torch.arange(len(matrix)) if self._is_whole else written.cumsum(0) - 1

    def drawn(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The mean cross-entropy of states [rows, channels] that are to say tokens [rows], of a batch: all its heads
        get the same others."""
        others = None
        if not self._is_whole:
            drawn = torch.randint(len(self._others), (_OTHERS,), generator=self._order)
            others = self._matrix[self._others[drawn]]

        def loss(states: Tensor, wanted: Tensor) -> Tensor:
            logits = states @ self._rows.T
            if others is not None:
                logits = torch.cat((logits, states @ others.T + math.log(len(self._others) / _OTHERS)), 1)
            return functional.cross_entropy(logits, self._place[wanted])

        return loss


def fit(
    heads: MedusaHeads,
    matrix: Tensor,
    samples: Samples,
    apart: Samples,
    epochs: int,
    seed: int,
    advance: Callable[[int], None],
) -> tuple[float, ...]:
    """Train the heads. Returns losses on held-out sequences, before training and after each epoch. The heads with the
    least loss are kept.

    matrix: [vocabulary, channels], which stays as it is. advance: told of each batch.
    """
    optimizer = torch.optim.AdamW(heads.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    steps = epochs * samples.batches
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate_at(step / steps))
    order = torch.Generator().manual_seed(seed)
    losses, best = [_loss_apart(heads, matrix, apart)], _copied(heads)
    vocabulary = _Vocabulary(matrix, samples, order)
    for _ in range(epochs):
        for chosen in torch.randperm(len(samples.states), generator=order).split(_BATCH):
            optimizer.zero_grad()
            _backward(heads, samples, chosen, vocabulary.drawn())
            optimizer.step()
            schedule.step()
            advance(1)
        losses.append(_loss_apart(heads, matrix, apart))
        if losses[-1] == min(losses):
            best = _copied(heads)
        elif min(losses[-_PATIENCE:]) > min(losses):
            break
    heads.load_state_dict(best)
    return tuple(losses)


def _backward(heads: MedusaHeads, samples: Samples, chosen: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Compute each head's gradient separately, on threads that divide no operation."""

    def backward(head: int) -> None:
        states, wanted = samples.known(chosen, head)
        loss(heads(states, head), wanted).backward()

    parallel_map(backward, range(heads.heads))


@torch.no_grad()
def acceptance(heads: MedusaHeads, matrix: Tensor, apart: Samples, head: int) -> HeadAcceptance:
    """The acceptance of one head."""
    hits = []
    for chosen in torch.arange(len(apart.states)).split(_BATCH):
        states, wanted = apart.known(chosen, head)
        hits.append((heads(states, head) @ matrix.T).topk(5).indices == wanted[:, None])
    matches = torch.cat(hits).float()
    return HeadAcceptance(float(matches[:, 0].mean()), float(matches.sum(-1).mean()))


def _rate_at(done: float) -> float:
    """Return the learning rate, which rises at first and then falls along a cosine. done: the share of all steps."""
    return min(1.0, done / _WARM_UP + _WARM_UP) * 0.5 * (1 + math.cos(math.pi * done))


def _loss(heads: MedusaHeads, matrix: Tensor, samples: Samples, chosen: Tensor, head: int) -> Tensor:
    states, wanted = samples.known(chosen, head)
    return functional.cross_entropy(heads(states, head) @ matrix.T, wanted)


def _loss_apart(heads: MedusaHeads, matrix: Tensor, apart: Samples) -> float:
    """The mean over all heads."""

    def loss(place: tuple[int, Tensor]) -> float:
        with torch.no_grad():
            return float(_loss(heads, matrix, apart, place[1], place[0]))

    parts = torch.arange(len(apart.states)).split(_BATCH)
    losses = parallel_map(loss, list(product(range(heads.heads), parts)))
    return sum(losses) / len(losses)


def _copied(heads: MedusaHeads) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in heads.state_dict().items()}
