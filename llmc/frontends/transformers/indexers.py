"""Indexers of transformers' models that let each query see only some keys, as llmc::choose_keys.

The model's own code scores all keys at once and takes min(count, keys), which fixes whether all keys are chosen.
"""

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from llmc.errors import CaptureError

# The attribute with the keys that llmc chose, for the attention hook.
CHOSEN = "llmc_chosen"


def _indexer(rotation: str) -> Callable[..., Tensor]:
    """rotation: the function of the model's module that turns the first channels of each head."""

    def choose(
        self: Any,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: None = None,
        cache: None = None,
    ) -> Tensor:
        """hidden_states, q_resid: [1, T, …]; returns [1, T, chosen].

        past_key_values: what transformers before 5.24 calls `cache`; no capture has one.
        """
        q = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
        k = self.k_norm(self.wk(hidden_states)).unflatten(-1, (1, self.head_dim))
        sizes = (self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim)
        (q_turning, q_rest), (k_turning, k_rest) = (tensor.split(sizes, -1) for tensor in (q, k))
        rotate = getattr(sys.modules[type(self).__module__], rotation)
        q_turned, k_turned = rotate(q_turning, k_turning, *position_embeddings, unsqueeze_dim=2)
        queries = torch.cat((q_turned, q_rest), -1).squeeze(0)
        keys = torch.cat((k_turned, k_rest), -1).squeeze(0).squeeze(1)
        scale = self.n_heads**-0.5 * self.head_dim**-0.5
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).squeeze(0).float() * scale
        chosen: Tensor = torch.ops.llmc.choose_keys.default(queries, keys, weights, self.index_topk).unsqueeze(0)
        setattr(chosen, CHOSEN, True)
        return chosen

    return choose


def _of_blocks(self: Any, *given: Any) -> NoReturn:
    raise CaptureError(
        f"{type(self).__name__} of layer {self.layer_idx} chooses among blocks of {self.compress_ratio} keys, for "
        "which llmc has no op",
        fix="only indexers that choose among the keys themselves are supported",
    )


_HALVES, _PAIRS = "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"
# By the class of a module and the method that they take the place of.
METHODS: dict[tuple[str, str], Callable[..., Any]] = {
    ("AXK2Indexer", "forward"): _indexer(_HALVES),
    ("DeepseekV32Indexer", "forward"): _indexer(_HALVES),
    ("Dots3NoteTextIndexer", "forward"): _indexer(_PAIRS),
    ("GlmMoeDsaIndexer", "forward"): _indexer(_PAIRS),
    ("Qwen4ExpTextQSAIndexer", "forward"): _of_blocks,
}
