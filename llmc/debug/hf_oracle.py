"""The oracle: a Hugging Face model as transformers runs it, eager on the CPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmc.debug.compare import LogitFunction, Logits
from llmc.errors import CheckpointError
from llmc.frontends.gguf.files import gguf_files


def hf_logits(directory: Path, dtype: str = "float32", *, longest: int | None = None) -> LogitFunction:
    """The logits of a model directory, or of one that was made of a GGUF file.

    Args:
        directory: The model's.
        dtype: float32, bfloat16 or float16.
        longest: Tokens of the longest sequence that the engine takes, which decides on rotary frequencies that follow
            the length; None for the model's own limit.
    """
    import torch

    from llmc.frontends.transformers.rotary_lengths import hold_frequencies
    from llmc.graph.dtype_names import NAMED_DTYPES

    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{directory} has no config.json, so there is no model to compare with",
            at=directory,
            fix="name what the engine was built from, a Hugging Face directory or a GGUF file: --against MODEL",
        )
    settings: dict[str, Any] = {"dtype": NAMED_DTYPES[dtype], "attn_implementation": "eager"}
    model = _of_gguf(directory, settings) if gguf_files(directory) else _of_directory(directory, settings)
    model.train(False)
    hold_frequencies(model, model.config.get_text_config(), longest, directory / "config.json")

    def logits(tokens: Sequence[int]) -> Logits:
        with torch.inference_mode():
            result: Logits = model(torch.tensor([list(tokens)])).logits[0].float().numpy()
        return result

    return logits


def _of_directory(directory: Path, settings: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, **settings)


def _of_gguf(directory: Path, settings: dict[str, Any]) -> Any:
    """The model with the numbers that the file's codes represent."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    from llmc.frontends.gguf.source import GgufSource

    source = GgufSource(directory)
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    tensors = {name: source.load(name) for name in source.names()}
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return model_class.from_pretrained(None, config=config, state_dict=tensors, **settings)
