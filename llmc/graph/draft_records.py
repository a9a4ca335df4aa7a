"""Records of draft checkpoints for passes: the target's hidden states that they read, and Medusa heads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from llmc.graph.weights import Recipe, ShapedSource

# Tensors of a draft's checkpoint in recipes, where the target's are called as they are.
PREFIX = "draft:"
Method = Literal["eagle3", "mtp"]


@dataclass(frozen=True)
class Target:
    """The model that drafts are for. width: the width of its hidden states. layers: number of its layers. embedding,
    output: the recipes of its table of embeddings and of its output matrix, [vocabulary, width]; the same for tied
    ones. longest: the sequences that are built for, in tokens; None if nothing says."""

    name: str
    width: int
    vocab_size: int
    layers: int
    dtype: torch.dtype
    embedding: Recipe
    output: Recipe
    longest: int | None

    def shared(self) -> dict[str, Recipe]:
        """The recipes that a draft without its own tensors takes, by the names of its parameters."""
        return {"embed_tokens.weight": self.embedding, "lm_head.weight": self.output}


@dataclass(frozen=True)
class Combination:
    """How hidden states of several layers become one: fc(concatenation), perhaps normalized before.

    fc: the name of [width, layers · target width]. whole_norm: the name of the weight of one norm over the
    concatenation. layer_norms: the names of the weights of one norm for each layer. eps: the eps of the norms.
    """

    fc: str
    fc_bias: str | None
    whole_norm: str | None
    layer_norms: tuple[str, ...]
    eps: float


@dataclass(frozen=True)
class MedusaBlock:
    """x + silu(weight·x + bias): names of tensors."""

    weight: str
    bias: str | None


@dataclass(frozen=True)
class MedusaHead:
    """Blocks, the first one first, and the head's own output matrix; None for the model's."""

    blocks: tuple[MedusaBlock, ...]
    output: str | None


@dataclass(frozen=True)
class MedusaCheckpoint:
    """Head i predicts the token i + 2 places after its own. token_map: the tensor of the tokens that a truncated
    vocabulary stands for. source: the source of all tensors of the heads, by their own names."""

    file: Path
    heads: tuple[MedusaHead, ...]
    token_map: str | None
    source: ShapedSource
