"""Position biases that transformers' models give to their attention for each query and key, only by distance."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import linear


def relative_logits(self: Any, relative_states: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """The bias of the keys 0, 1, … positions back for each query, the form that llmc::attention takes. The model's own
    code looks it up per key. relative_states: [1, T, heads, channels]; returns [1, heads, T, extent]."""
    return linear(relative_states, self.proj.t()).transpose(1, 2)


def relative_position_bias(self: Any, hidden_states: Tensor, relative_distance: Tensor, position_ids: Tensor) -> Tensor:
    """Return the same for a module that also has the projection of the queries. hidden_states: [1, T, channels]."""
    states = self.linear(hidden_states).unflatten(-1, (self.num_heads, -1))
    return linear(self.norm(states, position_ids), self.proj.t()).transpose(1, 2)


# By the class of a module and the method that they take the place of.
METHODS: dict[tuple[str, str], Callable[..., Any]] = {
    ("Inkling2LoopRelativePositionBias", "forward"): relative_position_bias,
    # For transformers before 5.24.
    ("Inkling2RelativeLogits", "forward"): relative_logits,
    ("Inkling2RelativePositionBias", "forward"): relative_position_bias,
    ("InklingRelativeLogits", "forward"): relative_logits,
}
