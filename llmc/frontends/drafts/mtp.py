"""Layers that predict one token more, which models bring with them: Qwen's `mtp.*` and DeepSeek's `model.layers.N.*`.

Both read the hidden state after the target's last norm, as the models' own code gives it to them, and hand on their
own output after their norm, to the next of several layers and to further drafts. Qwen has `mtp.fc`,
`pre_fc_norm_embedding`, `pre_fc_norm_hidden` and `norm`, for all its layers; DeepSeek the same as `eh_proj`, `enorm`,
`hnorm` and `shared_head.norm` in each, after the model's N layers. In both, the embedding comes before the hidden
state. The layers themselves are of the target's architecture.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.safetensors import SafetensorsSource
from llmc.frontends.drafts.draft_checkpoint import DraftModule, DraftTensors, attached_draft, parameter_recipes
from llmc.frontends.drafts.draft_decoder import decoder_of
from llmc.frontends.drafts.draft_modules import MtpDraft
from llmc.frontends.drafts.renamed_layer import RenamedLayer
from llmc.frontends.transformers.config import load_config
from llmc.graph.draft_records import Method, Target
from llmc.graph.model_graph import AttachedDraft, ModelInfo
from llmc.graph.weights import WeightSource


@dataclass(frozen=True)
class MtpCheckpoint:
    """The MTP layers of a directory, in the order of the tokens they predict; implements DraftCheckpoint. layers: for
    each, the checkpoint's names by prefixes of MtpDraft's parameters."""

    source: SafetensorsSource
    layers: tuple[Mapping[str, str], ...]
    method: Method = "mtp"

    def taps(self, layers: int, width: int) -> None:
        """Return None, because the drafter reads the input of the output matrix."""

    def notes(self, layers: int) -> tuple[str, ...]:
        """Return no notes."""
        return ()

    def combination(self, target: Target) -> None:
        """Return None, because there is one hidden state."""

    def graphs(self, target: Target, info: ModelInfo) -> tuple[AttachedDraft, ...]:
        """Return a graph for each layer. Raises CheckpointError for the layers of another model."""
        modules = [self._module(names, target) for names in self.layers]
        return tuple(attached_draft(module, self.method, info) for module in modules)

    def _module(self, names: Mapping[str, str], target: Target) -> DraftModule:
        file = self.source.directory / "config.json"
        loaded = load_config(self.source.directory)
        layer = RenamedLayer(self.source, names[LAYER], names[NORM], set(names.values()) - {names[LAYER]})
        config = _one_layer(loaded.config, has_experts=layer.has_experts)
        _check_sizes(config, target, file)
        decoder = decoder_of(config, loaded.model_class, file, target)
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
        tensors = DraftTensors(self.source, target.name)
        known = {name: recipe for name, recipe in target.shared().items() if names.get(name, "") not in tensors}
        known |= {f"decoder.{name}": recipe for name, recipe in layer.recipes(decoder).items()}
        recipes = parameter_recipes(module, tensors, names, known)
        return DraftModule(module, recipes, width, target.vocab_size, None)


# The prefixes of MtpDraft's parameters that are those of a layer of the target's kind, and of the norm after it.
LAYER, NORM = "decoder.layers.0.", "decoder.norm."
_QWEN_LAYER = re.compile(r"mtp\.layers\.(\d+)\..")
_PROJECTION = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")


def qwen_mtp(source: SafetensorsSource) -> MtpCheckpoint:
    """The layers of a directory with `mtp.*`, whose layers have one projection and one set of norms."""
    names = {
        "embedding_norm.": "mtp.pre_fc_norm_embedding.",
        "hidden_norm.": "mtp.pre_fc_norm_hidden.",
        "projection.": "mtp.fc.",
        NORM: "mtp.norm.",
    }
    numbers = {int(match[1]) for name in source.names() if (match := _QWEN_LAYER.match(name))} or {0}
    return MtpCheckpoint(source, tuple({**names, LAYER: f"mtp.layers.{number}."} for number in sorted(numbers)))


def deepseek_mtp(source: SafetensorsSource) -> MtpCheckpoint:
    """The layers of a directory with `model.layers.N.eh_proj`."""
    prefixes = [f"model.layers.{number}." for number in sorted(map(int, _projections(source)))]
    layers = [
        {
            "embedding_norm.": f"{layer}enorm.",
            "hidden_norm.": f"{layer}hnorm.",
            "projection.": f"{layer}eh_proj.",
            LAYER: layer,
            NORM: f"{layer}shared_head.norm.",
            "embed_tokens.weight": f"{layer}embed_tokens.weight",
            "lm_head.weight": f"{layer}shared_head.head.weight",
        }
        for layer in prefixes
    ]
    return MtpCheckpoint(source, tuple(layers))


def has_mtp(source: SafetensorsSource) -> bool:
    """Whether the directory holds such a layer, of either kind."""
    return any(name.startswith("mtp.") for name in source.names()) or bool(_projections(source))


def mtp_tensors(source: WeightSource) -> frozenset[str]:
    """The names of all tensors of such layers."""
    prefixes = ("mtp.", *(f"model.layers.{number}." for number in _projections(source)))
    return frozenset(name for name in source.names() if name.startswith(prefixes))


def _projections(source: WeightSource) -> list[str]:
    """The numbers of the layers with an eh_proj."""
    return [match[1] for name in source.names() if (match := _PROJECTION.fullmatch(name))]


def _check_sizes(config: Any, target: Target, file: Path) -> None:
    for name, actual, wanted in (
        ("hidden_size", config.hidden_size, target.width),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if actual != wanted:
            raise CheckpointError(
                f"the draft's {name} is {actual}, that of {target.name} is {wanted}",
                at=file,
                fix="take the draft that was trained for this model",
            )


def _one_layer(config: Any, *, has_experts: bool) -> Any:
    """The config of one layer with full attention, the last of its kind, with experts or without."""
    shortened = copy.deepcopy(config)
    shortened.num_hidden_layers = 1
    if getattr(shortened, "layer_types", None):
        shortened.layer_types = [
            "full_attention" if "full_attention" in shortened.layer_types else shortened.layer_types[-1]
        ]
    # As architectures say which of their layers have experts.
    for name, value in (
        ("first_k_dense_replace", 0 if has_experts else 1),
        ("mlp_layer_types", ["sparse" if has_experts else "dense"]),
        ("mlp_only_layers", [] if has_experts else [0]),
        ("decoder_sparse_step", 1),
    ):
        if getattr(shortened, name, None) is not None:
            setattr(shortened, name, value)
    return shortened
