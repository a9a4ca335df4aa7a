"""Heads as files: safetensors in the published layout (Medusa-1), and what their readers want to know beside it."""

import json
from pathlib import Path

from safetensors.torch import save_file

from llmc.engine_format import ModelRecord
from llmc.errors import OptionError
from llmc.frontends.checkpoints.directory_files import read_json
from llmc.training.medusa_heads import MedusaHeads

_CONFIG = "config.json"


def check_place(path: Path) -> None:
    """Raise OptionError where heads cannot be written, or where a config.json of something else would be lost."""
    if path.suffix != ".safetensors":
        raise OptionError(f"{path} is no .safetensors file", at="-o", fix=f"name one: {path}/heads.safetensors")
    config = path.parent / _CONFIG
    if config.exists() and "medusa_num_heads" not in read_json(config):
        raise OptionError(
            "a config.json of something else stands beside it", at=config, fix="give the heads a directory of their own"
        )


def write_heads(path: Path, heads: MedusaHeads, model: ModelRecord, output_shape: tuple[int, ...]) -> None:
    """The heads, and config.json beside them with the keys of Medusa and of vLLM."""
    vocabulary, channels = output_shape
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in heads.tensors().items()}, path)
        config = {
            "model_type": "medusa",
            "base_model_name_or_path": model.name,
            "medusa_num_heads": heads.heads,
            "medusa_num_layers": heads.layers,
            "num_heads": heads.heads,
            "num_hidden_layers": heads.layers,
            "hidden_size": channels,
            "vocab_size": vocabulary,
            "truncated_vocab_size": vocabulary,
            "medusa_fc_bias": True,
            "original_lm_head": True,
        }
        (path.parent / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"the heads cannot be written: {error.strerror}", at=path, fix="name another place") from None
