"""The supported architectures, by their names in files."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from llmc.errors import CheckpointError
from llmc.frontends.gguf.container import GgufModel
from llmc.frontends.gguf.description import Described, Sizes, sizes_of
from llmc.frontends.gguf.families.gemma import gemma, gemma2, gemma3
from llmc.frontends.gguf.families.gpt_oss import gpt_oss
from llmc.frontends.gguf.families.llama import llama
from llmc.frontends.gguf.families.olmoe import olmoe
from llmc.frontends.gguf.families.phi3 import phi3
from llmc.frontends.gguf.families.qwen import qwen2, qwen2moe, qwen3, qwen3moe
from llmc.frontends.gguf.families.starcoder2 import starcoder2
from llmc.frontends.gguf.placement import Place, placed

ARCHITECTURES: Mapping[str, Callable[[GgufModel, Sizes], Described]] = MappingProxyType(
    {
        "llama": llama,
        "qwen2": qwen2,
        "qwen3": qwen3,
        "gemma": gemma,
        "gemma2": gemma2,
        "gemma3": gemma3,
        "phi3": phi3,
        "starcoder2": starcoder2,
        "qwen2moe": qwen2moe,
        "qwen3moe": qwen3moe,
        "olmoe": olmoe,
        "gpt-oss": gpt_oss,
    }
)


def described(model: GgufModel) -> tuple[Mapping[str, Any], dict[str, Place]]:
    """A file's model in the words of transformers: config.json's content, and where each of its tensors is. Raises
    CheckpointError for an architecture that is not read."""
    name = model.metadata.text("general.architecture")
    family = ARCHITECTURES.get(name)
    if family is None:
        raise CheckpointError(
            f"architecture {name!r:.40} is not supported in GGUF files",
            at=model.path,
            fix=f"llmc reads {', '.join(ARCHITECTURES)}; build others from their safetensors checkpoints",
        )
    sizes = sizes_of(model)
    description = family(model, sizes)
    return description.config, placed(model, description.names, sizes.layers)
