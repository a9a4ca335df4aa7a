"""The module captured for a model with a head: forward(input_ids, positions) -> a row after each token.

The row after a token is what the head gives for the text up to it, so a graph of rows is as token-major as one of
logits, and a step computes it for the requested rows: the texts' last ones.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from llmc.errors import CaptureError
from llmc.frontends.heads.head_plan import HeadPlan
from llmc.frontends.heads.sentence_modules import DenseModule
from llmc.frontends.tracing.trace import explained_at_once
from llmc.program import Pooling, Task

_ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "GELU": nn.GELU, "SiLU": nn.SiLU, "ReLU": nn.ReLU}


class RowModule(nn.Module):
    """A transformers model with its head. llmc.ops must have been imported."""

    def __init__(self, model: Any, plan: HeadPlan) -> None:
        super().__init__()
        self.model = model
        self.dense = nn.ModuleList(_dense(module, model) for module in plan.dense)
        self._pooling = plan.head.pooling
        self._embeds = plan.head.task is Task.EMBED
        self._separator = plan.separator
        if not self._embeds and not hasattr(model, "score"):
            _read_every_row(model, self._pooling)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Run the model and its head. input_ids, positions: [1, T]. Returns [1, T, width]."""
        with explained_at_once():
            if self._embeds:
                rows = pooled(self._call(self.model, input_ids, positions).last_hidden_state, self._pooling)
                for dense in self.dense:
                    rows = dense(rows)
                return rows
            if self._pooling is Pooling.LAST:
                states = self._call(self.model.base_model, input_ids, positions).last_hidden_state
                scores: Tensor = self.model.score(states)
                return scores
            logits: Tensor = self._call(self.model, input_ids, positions).logits
            return logits.unsqueeze(0)

    def _call(self, model: Any, input_ids: Tensor, positions: Tensor) -> Any:
        """Models that number tokens from the ids take no positions."""
        known = inspect.signature(model.forward).parameters
        segments = torch.zeros_like(input_ids)
        if self._separator is not None:
            pair = self._separator, model.config.type_vocab_size
            segments = torch.ops.llmc.segments.default(input_ids.squeeze(0), *pair).unsqueeze(0)
        keywords: dict[str, Any] = {"use_cache": False, "token_type_ids": segments}
        if not numbers_ids(model):
            keywords["position_ids"] = positions
        keywords = {name: value for name, value in keywords.items() if name in known}
        return model(input_ids=input_ids, return_dict=True, **keywords)


def pooled(states: Tensor, pooling: Pooling) -> Tensor:
    """Pool hidden states over the text up to each token. states: [1, T, C]. Returns the same shape."""
    if pooling is Pooling.LAST:
        return states
    rows: Tensor = torch.ops.llmc.pool.default(states.squeeze(0), pooling.value)
    return rows.unsqueeze(0)


def _read_every_row(model: Any, pooling: Pooling) -> None:
    """Let an encoder's classifier, which reads the first token of each text, read the rows of one as texts of a token.

    Its input becomes the pool of the text up to each token.
    """

    def as_texts(states: Tensor) -> Tensor:
        return pooled(states, pooling).squeeze(0).unsqueeze(1)

    def after_base(module: Any, given: Any, output: Any) -> Any:
        output.last_hidden_state = as_texts(output.last_hidden_state)
        return output

    if hasattr(model.config, "classifier_pooling"):
        model.config.classifier_pooling = "cls"
    model.base_model.register_forward_hook(after_base)
    pooler = getattr(model.base_model, "pooler", None)
    if pooler is not None:
        pooler.register_forward_pre_hook(lambda module, given: (as_texts(given[0]), *given[1:]))


def numbers_ids(model: Any) -> bool:
    """Whether a model counts positions from its ids: RoBERTa's begin after the padding's."""
    return any(hasattr(part, "create_position_ids_from_input_ids") for part in model.modules())


def _dense(module: DenseModule, model: Any) -> nn.Module:
    """The Dense module as a layer, with fake parameters if the model's are fake."""
    activation = _ACTIVATIONS.get(module.activation)
    if activation is None:
        raise CaptureError(
            f"the activation {module.activation} of a Dense module is not known",
            at=module.directory / "config.json",
            fix=f"llmc knows {', '.join(_ACTIVATIONS)}",
        )
    with next(model.parameters()).fake_mode:
        linear = nn.Linear(module.inputs, module.outputs, bias=module.has_bias, dtype=model.dtype)
    return nn.Sequential(linear, activation())
