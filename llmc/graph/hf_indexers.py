"""Indexers of transformers' models that let each query see some keys alone, as llmc::choose_keys.

The model's own code scores all keys at once and takes as many as there are, which fixes whether those are all.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The attribute of what llmc chose, for the attention hook.
CHOSEN = "llmc_chosen"


def _indexer(rotation: str = "apply_rotary_pos_emb", *, rotated_first: bool = True) -> Callable[..., Tensor]:
    """rotation: the function of the model's module. rotated_first: whether a head's rotated channels come first."""

    def choose(
        self: Any,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: None = None,
    ) -> Tensor:
        """hidden_states, q_resid: [1, T, …]; returns [1, T, chosen]."""
        q = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
        normed = self.k_norm(self.wk(hidden_states).to(self.k_norm.weight.dtype))
        k = normed.to(hidden_states.dtype).unflatten(-1, (1, self.head_dim))
        rotated, plain = self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim
        sizes = (rotated, plain) if rotated_first else (plain, rotated)
        parts = [each.split(sizes, -1) for each in (q, k)]
        if not rotated_first:
            parts = [(b, a) for a, b in parts]
        rotate = getattr(sys.modules[type(self).__module__], rotation)
        turned = rotate(parts[0][0], parts[1][0], *position_embeddings, unsqueeze_dim=2)
        pairs = [(a, b) if rotated_first else (b, a) for a, (_, b) in zip(turned, parts, strict=True)]
        q, k = (torch.cat(pair, -1).squeeze(0) for pair in pairs)
        scale = self.n_heads**-0.5 * self.head_dim**-0.5
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).squeeze(0).float() * scale
        found: Tensor = torch.ops.llmc.choose_keys.default(q, k.squeeze(1), weights, self.index_topk).unsqueeze(0)
        setattr(found, CHOSEN, True)
        return found

    return choose


_INTERLEAVED = "apply_rotary_pos_emb_interleave"
# By the class of a module and the method that they take the place of.
METHODS: dict[tuple[str, str], Callable[..., Any]] = {
    ("AXK2Indexer", "forward"): _indexer(),
    ("DeepseekV32Indexer", "forward"): _indexer(),
    ("Dots3NoteTextIndexer", "forward"): _indexer(_INTERLEAVED),
    ("GlmMoeDsaIndexer", "forward"): _indexer(_INTERLEAVED),
    ("HYV4Indexer", "forward"): _indexer(rotated_first=False),
}
