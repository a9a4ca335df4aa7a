"""EAGLE-3 drafts in the layout of github.com/vllm-project/speculators, which vLLM serves.

config.json says `speculators_model_type`, has the decoder layers under `transformer_layer_config`, and says which norms
there are. Layers are numbered as in vLLM: i is the hidden state before layer i, the number of layers after the last.
"""

from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.directory_files import read_json
from llmc.frontends.drafts.eagle3 import Eagle3Settings, layer_ids

KIND = "speculators_model_type"


def read_speculators(directory: Path) -> Eagle3Settings:
    """The settings of a directory in this layout. Raises CheckpointError."""
    file = directory / "config.json"
    settings = read_json(file)
    if settings.get(KIND) != "eagle3":
        raise CheckpointError(
            f"{KIND} is {settings.get(KIND)!r:.60}, which llmc has no drafter for", at=file, fix="take an eagle3 draft"
        )
    decoder = settings.get("transformer_layer_config")
    if not isinstance(decoder, dict):
        raise CheckpointError(
            f"transformer_layer_config is {decoder!r:.60}, not an object", at=file, fix="download the checkpoint again"
        )
    # Its authors' default is false, vLLM's true: what is left out may be either.
    before_residual = _flag(settings, "norm_before_residual", file, None)
    flags = {name: _flag(settings, name, file, False) for name in ("norm_before_fc", "fc_norm", "norm_output")}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise CheckpointError("norm_before_fc and fc_norm are both true", at=file, fix="set only one of them")
    return Eagle3Settings(
        file,
        {"model_type": "qwen3", **decoder},
        layer_ids(settings, file),
        norm_before_residual=before_residual,
        **flags,
    )


def _flag(settings: dict[str, Any], name: str, file: Path, default: bool | None) -> bool:
    value = settings.get(name, default)
    if not isinstance(value, bool):
        raise CheckpointError(
            f"{name} is {value!r:.60}, not true or false", at=file, fix=f'set how the draft was trained: "{name}": ...'
        )
    return value
