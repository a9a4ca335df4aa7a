"""The experts function "llmc" that transformers' mixtures call while they are captured, and methods in the place of
those that call none.

Each emits llmc::expert_linear, with the model's own gate in between, where the model's code walks over the experts that
have tokens. llmc.ops must have been imported.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IMPLEMENTATION = "llmc"


def use_experts_hook(config: Any) -> None:
    """Let mixtures of experts of a model, or of one that is made of this config, call the hook; others do not ask."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:  # before transformers 5
        return
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_hook)
    config._experts_implementation = IMPLEMENTATION


def experts_hook(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states: [T, hidden], top_k_index and top_k_weights: [T, slots]; returns [T, hidden].

    The weights of a module of transformers' experts interface are [experts, out, in], or [experts, in, out].
    """
    first = "gate_up_proj" if module.has_gate else "up_proj"
    y = _expert_linear(module, first, hidden_states, top_k_index)
    y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    y = _expert_linear(module, "down_proj", y, top_k_index)
    if getattr(module, "has_post_expert_norm", False):  # The first versions of transformers 5 have none.
        y = module.post_expert_norm(y)
    return _sum_experts(y, top_k_weights).to(hidden_states.dtype)


def _expert_linear(module: Any, name: str, x: Tensor, index: Tensor) -> Tensor:
    weight: Tensor = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return _product(weight.transpose(1, 2) if module.is_transposed else weight, x, index, bias)


def identity_experts(self: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Experts of LongCat Flash, whose last experts are identities. x: [T, hidden]; index, weights: [T, slots]."""
    experts = self.num_routed_experts
    of_nobody = torch.where(index >= experts, weights, torch.zeros_like(weights)).sum(-1, keepdim=True)
    gate, up = _product(self.gate_up_proj[:experts], x, index).chunk(2, dim=-1)
    y = _product(self.down_proj, self.act_fn(gate) * up, index)
    return _sum_experts(y, weights).to(x.dtype) + x * of_nobody.to(x.dtype)


def jetmoe(self: Any, layer_input: Tensor) -> Tensor:
    """Compute JetMoe's feed-forward layer. layer_input: [1, T, hidden]; returns the same."""
    x = layer_input.squeeze(0)
    routes = _jetmoe_routes(self.router, x)
    gate, up = _product(self.input_linear.weight, x, routes[0]).chunk(2, dim=-1)
    return _jetmoe_sum(self, self.activation(gate) * up, routes)


def jetmoe_queries(self: Any, layer_input: Tensor) -> tuple[Tensor, None, tuple[Tensor, Tensor]]:
    """The queries of JetMoe's attention, [1, T, slots, channels], and where tokens were sent, for their outputs."""
    x = layer_input.squeeze(0)
    routes = _jetmoe_routes(self.router, x)
    return _product(self.input_linear.weight, x, routes[0]).unsqueeze(0), None, routes


def jetmoe_outputs(self: Any, layer_input: Tensor, routes: tuple[Tensor, Tensor]) -> Tensor:
    """Output projections of JetMoE's attention experts. layer_input: [1, T, slots, channels]; returns [1, T,
    hidden]."""
    return _jetmoe_sum(self, layer_input.squeeze(0), routes)


def _jetmoe_sum(self: Any, x: Tensor, routes: tuple[Tensor, Tensor]) -> Tensor:
    index, weights = routes
    summed: Tensor = _sum_experts(_product(self.output_linear.weight, x, index), weights) + self.bias
    return summed.unsqueeze(0)


def _jetmoe_routes(router: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    values, index = router.layer(x).float().topk(router.top_k, dim=1)
    return index, torch.softmax(values, dim=1).type_as(x)


def _product(weight: Tensor, x: Tensor, index: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight: [experts, out, in]; bias: [experts, out]."""
    rows = weight.flatten(0, 1)
    product: Tensor = torch.ops.llmc.expert_linear.default(
        x, rows, None if bias is None else bias.flatten(), index, weight.shape[0]
    )
    return product


def _sum_experts(y: Tensor, weights: Tensor) -> Tensor:
    summed: Tensor = torch.ops.llmc.sum_experts.default(y, weights)
    return summed


def dbrx_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states: [1, T, hidden]; top_k_index, top_k_weights: [T, slots]. Returns the same as hidden_states."""
    x, experts, mlp = hidden_states.squeeze(0), self.num_experts, self.mlp
    gate = mlp.activation_fn(torch.ops.llmc.expert_linear.default(x, mlp.w1, None, top_k_index, experts))
    up = torch.ops.llmc.expert_linear.default(x, mlp.v1, None, top_k_index, experts)
    down = mlp.w2.view(experts, self.ffn_hidden_size, self.hidden_size).transpose(1, 2).flatten(0, 1)
    y = torch.ops.llmc.expert_linear.default(gate * up, down, None, top_k_index, experts)
    return _sum_experts(y, top_k_weights).to(hidden_states.dtype).unsqueeze(0)


# By the class of a module and the method that they take the place of.
METHODS: dict[tuple[str, str], Callable[..., Any]] = {
    ("DbrxExperts", "forward"): dbrx_experts,
    ("JetMoeMoA", "map"): jetmoe_queries,
    ("JetMoeMoA", "reduce"): jetmoe_outputs,
    ("JetMoeMoE", "forward"): jetmoe,
    ("LongcatFlashExperts", "forward"): identity_experts,
}
