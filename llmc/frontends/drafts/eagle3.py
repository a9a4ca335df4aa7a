"""EAGLE-3 drafts, in the layout of their authors (github.com/SafeAILab/EAGLE) and of SpecForge.

config.json describes the one decoder layer, whose tensors are `midlayer.*` (or `layers.0.*`); further tensors are `fc`,
`norm`, `lm_head` over the draft's own vocabulary, and `d2t`, the offset from one of its ids to the target's id.

Which hidden states they read: numbers are those of layers, and the state *before* a layer is meant, as in the authors'
code and in vLLM, which reads `eagle_aux_hidden_state_layer_ids` at the top of config.json. In `eagle_config`, which
SGLang and SpecForge write, a list that begins with 1 counts the states *after* layers (SGLang #25454).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.directory_files import read_json
from llmc.frontends.checkpoints.safetensors import SafetensorsSource
from llmc.frontends.drafts.draft_checkpoint import DraftModule, DraftTensors, attached_draft, parameter_recipes
from llmc.frontends.drafts.draft_decoder import draft_decoder
from llmc.frontends.drafts.draft_modules import Eagle3Draft, Eagle3FirstLayer
from llmc.graph.draft_records import PREFIX, Combination, Method, Target
from llmc.graph.model_graph import AttachedDraft, ModelInfo

_PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_USUAL_LAYERS = 3  # as tapped_layers has them
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Eagle3Settings:
    """The settings of an EAGLE-3 checkpoint. decoder: the config of its layers, as transformers has them. layer_ids:
    before which of the target's layers hidden states are taken; None for the usual three. The norms as speculators
    calls them."""

    file: Path
    decoder: Mapping[str, Any]
    layer_ids: tuple[int, ...] | None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def tapped_layers(self, layers: int) -> tuple[int, ...]:
        """The layers whose inputs are read; `layers` stands for the output of the last. Raises CheckpointError."""
        ids = (2, layers // 2, layers - 3) if self.layer_ids is None else self.layer_ids
        if not ids or any(not 0 <= layer_id <= layers for layer_id in ids) or len(set(ids)) < len(ids):
            raise CheckpointError(
                f"hidden states before the layers {list(ids)} do not exist in a model of {layers} layers",
                at=self.file,
                fix="take a draft that was trained for this model, or give those that this one was trained on: "
                f'"{LAYER_IDS}": [...]',
            )
        return ids


def read_eagle3(directory: Path) -> Eagle3Settings:
    """The settings of a directory in the authors' layout. Raises CheckpointError."""
    file = directory / "config.json"
    settings = read_json(file)
    nested = settings.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise CheckpointError(f"eagle_config is {nested!r:.60}, not an object", at=file, fix="correct the value")
    return Eagle3Settings(
        file,
        {"model_type": "llama", **settings},
        _before_layers(layer_ids(nested, file)) or layer_ids(settings, file),
        **{name: bool(settings.get(name, False)) for name in ("norm_before_fc", "fc_norm", "norm_output")},
    )


def layer_ids(settings: Mapping[str, Any], file: Path) -> tuple[int, ...] | None:
    """The layers that a config lists; None if it does not. Raises CheckpointError if the value is not a list of
    numbers."""
    ids = settings.get(LAYER_IDS)
    if not ids:
        return None
    if not isinstance(ids, list) or any(type(layer_id) is not int for layer_id in ids):
        raise CheckpointError(f"{LAYER_IDS} is {ids!r:.80}, not a list of numbers", at=file, fix="correct the value")
    return tuple(ids)


def _before_layers(ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """SGLang's numbers as ours."""
    return ids if ids is None or ids[0] != 1 else tuple(layer_id + 1 for layer_id in ids)


@dataclass(frozen=True)
class Eagle3Checkpoint:
    """A draft that reads several layers' hidden states; as DraftCheckpoint."""

    settings: Eagle3Settings
    source: SafetensorsSource
    method: Method = "eagle3"

    def taps(self, layers: int, width: int) -> tuple[int, ...]:
        """Return the layers before which hidden states are read. Raises CheckpointError for a draft of another model.

        layers, width: number of layers of the model, and width of its hidden states. The width is checked first:
        a wrong width always means another model.
        """
        _check_width(self.settings, DraftTensors(self.source, "this model"), width)
        return self.settings.tapped_layers(layers)

    def notes(self, layers: int) -> tuple[str, ...]:
        """Return a note if config.json does not name the layers to read. layers: number of layers of the model."""
        if self.settings.layer_ids is not None:
            return ()
        ids = list(self.settings.tapped_layers(layers))
        return (f"the draft's config.json names no {LAYER_IDS}: hidden states are taken before the layers {ids}",)

    def combination(self, target: Target) -> Combination:
        """Return how the hidden states become one. Raises CheckpointError for a draft of a model with other layers."""
        settings, count = self.settings, len(self.settings.tapped_layers(target.layers))
        has_bias = "fc.bias" in DraftTensors(self.source, target.name)
        return Combination(
            fc=PREFIX + "fc.weight",
            fc_bias=PREFIX + "fc.bias" if has_bias else None,
            whole_norm=PREFIX + "input_norm.weight" if settings.norm_before_fc else None,
            layer_norms=tuple(f"{PREFIX}fc_norm.{i}.weight" for i in range(count)) if settings.fc_norm else (),
            eps=float(settings.decoder.get("rms_norm_eps", 1e-6)),
        )

    def graphs(self, target: Target, info: ModelInfo) -> tuple[AttachedDraft, ...]:
        """Return the graph of the draft. Raises CheckpointError for a draft of another model."""
        return (attached_draft(_module(self.settings, self.source, target), self.method, info),)


def _check_width(settings: Eagle3Settings, tensors: DraftTensors, width: int) -> None:
    count = _USUAL_LAYERS if settings.layer_ids is None else len(settings.layer_ids)
    shape = tensors.shape("fc.weight")
    if len(shape) != 2 or shape[1] != count * width:
        of = f" of {shape[1] // count}" if len(shape) == 2 and shape[1] % count == 0 else ""
        raise CheckpointError(
            f"the draft reads {count} hidden states{of} (its fc.weight is {list(shape)}), those of this model have "
            f"{width}",
            at=settings.file.parent,
            fix="take the draft that was trained for this model, and check its layer ids",
        )


def _module(settings: Eagle3Settings, source: SafetensorsSource, target: Target) -> DraftModule:
    tensors = DraftTensors(source, target.name)
    decoder = draft_decoder(dict(settings.decoder), settings.file, target)
    _check_parts(decoder, settings.file)
    config, norm_class = decoder.config, type(decoder.norm)
    width, eps = config.hidden_size, config.rms_norm_eps

    def norm() -> nn.Module:
        made: nn.Module = norm_class(width, eps=eps)
        return made.to(target.dtype)

    rows = tensors.shape("lm_head.weight")[0] if "lm_head.weight" in tensors else target.vocab_size
    id_offsets = _id_offsets(tensors, rows, target, settings.file)
    _check_shared(tensors, width, target, settings.file)
    with torch.device("meta"):
        decoder.layers[0] = Eagle3FirstLayer(
            decoder.layers[0], norm(), width, norm_before_residual=settings.norm_before_residual
        )
        decoder.norm = nn.Identity()
        module = Eagle3Draft(
            nn.Embedding(target.vocab_size, width, dtype=target.dtype),
            decoder,
            norm(),
            nn.Linear(width, rows, bias=False, dtype=target.dtype),
            norm_output=settings.norm_output,
        )
    first = "midlayer." if any(name.startswith("midlayer.") for name in source.names()) else "layers.0."
    stored = {"": "", "decoder.layers.": "layers.", "decoder.layers.0.": first}
    shared = {name: recipe for name, recipe in target.shared().items() if name not in tensors}
    recipes = parameter_recipes(module, tensors, stored, shared)
    return DraftModule(module, recipes, width, rows, id_offsets)


def _id_offsets(tensors: DraftTensors, rows: int, target: Target, file: Path) -> str | None:
    """The tensor that says which of the target's ids each row of the output matrix is for."""
    if "t2d" in tensors and tensors.shape("t2d") != (target.vocab_size,):
        raise CheckpointError(
            f"the draft is for a vocabulary of {tensors.shape('t2d')[0]} tokens (t2d), {target.name} has "
            f"{target.vocab_size}",
            at=file.parent,
            fix="take the draft that was trained for this model",
        )
    if "d2t" not in tensors:
        if rows != target.vocab_size:
            raise CheckpointError(
                f"the draft's output matrix has {rows} rows and no d2t says which of {target.name}'s "
                f"{target.vocab_size} tokens they are for",
                at=file.parent,
                fix="take the draft that was trained for this model, or download the whole checkpoint again",
            )
        return None
    tensors.recipe("d2t", (rows,), torch.int64)
    return PREFIX + "d2t"


def _check_shared(tensors: DraftTensors, width: int, target: Target, file: Path) -> None:
    """Embeddings that are the target's have to be as wide as the draft's layer."""
    if "embed_tokens.weight" not in tensors and width != target.width:
        raise CheckpointError(
            f"the draft's hidden_size is {width} and it has no embeddings; those of {target.name} have {target.width}",
            at=file,
            fix="take the draft that was trained for this model",
        )


def _check_parts(decoder: Any, file: Path) -> None:
    layer = decoder.layers[0]
    lacking = [name for name in _PARTS if not hasattr(layer, name)] or [
        name for name in ("q_proj", "k_proj", "v_proj") if not hasattr(layer.self_attn, name)
    ]
    if lacking:
        raise CheckpointError(
            f"layers of {decoder.config.model_type!r} have no {', '.join(lacking)}, whose input EAGLE-3 extends",
            at=file,
            fix="take a draft whose layers are those of llama, qwen2 or qwen3",
        )
