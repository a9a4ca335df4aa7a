"""Mixtures of transformers that walk over the experts with a token, which no graph can follow, as llmc:: ops.

Models of transformers' experts interface call a hook (`llmc/graph/hf_hooks.py`); of these the methods are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_llmc = torch.ops.llmc


def dbrx_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states: [1, T, hidden]; top_k_index, top_k_weights: [T, slots]. Returns the same as hidden_states."""
    x, experts, mlp = hidden_states.squeeze(0), self.num_experts, self.mlp
    gate = mlp.activation_fn(_llmc.expert_linear.default(x, mlp.w1, None, top_k_index, experts))
    up = _llmc.expert_linear.default(x, mlp.v1, None, top_k_index, experts)
    down = mlp.w2.view(experts, self.ffn_hidden_size, self.hidden_size).transpose(1, 2).flatten(0, 1)
    y = _llmc.expert_linear.default(gate * up, down, None, top_k_index, experts)
    summed: Tensor = _llmc.sum_experts.default(y, top_k_weights)
    return summed.to(hidden_states.dtype).unsqueeze(0)


# By the class of a module and the method that they take the place of.
METHODS: dict[tuple[str, str], Callable[..., Any]] = {("DbrxExperts", "forward"): dbrx_experts}
