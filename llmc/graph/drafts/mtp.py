"""Layers that predict one token more, which models bring with them: Qwen's `mtp.*` and DeepSeek's `model.layers.N.*`.

Both read the hidden state after the target's last norm, as the models' own code gives it to them, and hand on their
own output after their norm. Qwen has `mtp.fc`, `pre_fc_norm_embedding`, `pre_fc_norm_hidden` and `norm`; DeepSeek the
same as `eh_proj`, `enorm`, `hnorm` and `shared_head.norm`, after the model's N layers. In both, the embedding comes
before the hidden state. The layer itself is one of the target's architecture.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llmc.errors import CheckpointError
from llmc.graph.checkpoint import SafetensorsSource
from llmc.graph.drafts.draft_checkpoint import (
    DraftModule,
    DraftTensors,
    Method,
    Target,
    parameter_recipes,
)
from llmc.graph.drafts.draft_decoder import decoder_of
from llmc.graph.drafts.draft_modules import MtpDraft
from llmc.graph.hf_config import load_config
from llmc.graph.weights import WeightSource

# What layers have that no engine computes yet, by a part of their tensors' names.
_NOT_YET = {"mlp.experts.": "a mixture of experts", "self_attn.kv_a_proj": "multi-head latent attention"}


@dataclass(frozen=True)
class MtpCheckpoint:
    """The first such layer of a directory; as DraftCheckpoint. names: the checkpoint's, by prefixes of MtpDraft's
    parameters. layers: how many there are."""

    source: SafetensorsSource
    names: Mapping[str, str]
    layers: int
    method: Method = "mtp"

    def taps(self, layers: int) -> None:
        """What the output matrix reads."""

    def notes(self, layers: int) -> tuple[str, ...]:
        """Of layers that are left out."""
        if self.layers == 1:
            return ()
        return (f"of {self.layers} layers that predict further tokens the first one drafts them all",)

    def combination(self, target: Target) -> None:
        """None: there is one hidden state."""

    def module(self, target: Target) -> DraftModule:
        """Raises CheckpointError for another model's, or a layer that engines do not compute."""
        self._check_known()
        file = self.source.directory / "config.json"
        loaded = load_config(self.source.directory)
        config = _one_layer(loaded.config)
        for name, found, wanted in (
            ("hidden_size", config.hidden_size, target.width),
            ("vocab_size", config.vocab_size, target.vocab_size),
        ):
            if found != wanted:
                raise CheckpointError(
                    f"the draft's {name} is {found}, that of {target.name} is {wanted}",
                    at=file,
                    fix="take the draft that was trained for this model",
                )
        tensors = DraftTensors(self.source, target.name)
        decoder = decoder_of(config, loaded.model_class, file, target.dtype)
        width, eps = config.hidden_size, config.rms_norm_eps
        with torch.device("meta"):
            embedding_norm, hidden_norm = (type(decoder.norm)(width, eps=eps).to(target.dtype) for _ in range(2))
            module = MtpDraft(
                nn.Embedding(target.vocab_size, width, dtype=target.dtype),
                embedding_norm,
                hidden_norm,
                nn.Linear(2 * width, width, bias=False, dtype=target.dtype),
                decoder,
                nn.Linear(width, target.vocab_size, bias=False, dtype=target.dtype),
            )
        shared = {
            name: recipe
            for name, recipe in (("embed_tokens.weight", target.embedding), ("lm_head.weight", target.output))
            if self.names.get(name, "") not in tensors
        }
        return DraftModule(
            module, parameter_recipes(module, tensors, self.names, shared), width, target.vocab_size, None
        )

    def _check_known(self) -> None:
        prefix = self.names["decoder.layers.0."]
        for part, what in _NOT_YET.items():
            if any(name.startswith(prefix + part) for name in self.source.names()):
                raise CheckpointError(
                    f"the layer that predicts further tokens has {what}, which engines do not compute yet",
                    at=self.source.directory,
                    fix="build without --speculative, and let a draft model or n-grams speculate",
                )


def qwen_mtp(source: SafetensorsSource) -> MtpCheckpoint:
    """Of a directory with `mtp.*`."""
    names = {
        "embedding_norm.": "mtp.pre_fc_norm_embedding.",
        "hidden_norm.": "mtp.pre_fc_norm_hidden.",
        "projection.": "mtp.fc.",
        "decoder.layers.0.": "mtp.layers.0.",
        "decoder.norm.": "mtp.norm.",
    }
    layers = {name.split(".")[2] for name in source.names() if name.startswith("mtp.layers.")}
    return MtpCheckpoint(source, names, len(layers))


def deepseek_mtp(source: SafetensorsSource) -> MtpCheckpoint:
    """Of a directory with `model.layers.N.eh_proj`."""
    found = sorted(int(number) for number in _projections(source))
    layer = f"model.layers.{found[0]}."
    names = {
        "embedding_norm.": f"{layer}enorm.",
        "hidden_norm.": f"{layer}hnorm.",
        "projection.": f"{layer}eh_proj.",
        "decoder.layers.0.": layer,
        "decoder.norm.": f"{layer}shared_head.norm.",
        "embed_tokens.weight": f"{layer}embed_tokens.weight",
        "lm_head.weight": f"{layer}shared_head.head.weight",
    }
    return MtpCheckpoint(source, names, len(found))


def has_mtp(source: SafetensorsSource) -> bool:
    """Whether the directory holds such a layer, of either kind."""
    return any(name.startswith("mtp.") for name in source.names()) or bool(_projections(source))


def mtp_tensors(source: WeightSource) -> frozenset[str]:
    """The names of all tensors of such layers."""
    prefixes = ("mtp.", *(f"model.layers.{number}." for number in _projections(source)))
    return frozenset(name for name in source.names() if name.startswith(prefixes))


def _projections(source: WeightSource) -> list[str]:
    """The numbers of the layers with an eh_proj."""
    parts = (name.split(".") for name in source.names() if name.endswith(".eh_proj.weight"))
    return [each[2] for each in parts if len(each) == 5 and each[:2] == ["model", "layers"] and each[2].isdigit()]


def _one_layer(config: Any) -> Any:
    """The config of one layer with full attention, the last of its kind."""
    one = copy.deepcopy(config)
    one.num_hidden_layers = 1
    if getattr(one, "layer_types", None):
        one.layer_types = ["full_attention" if "full_attention" in one.layer_types else one.layer_types[-1]]
    return one
