"""What a module is called, whoever says it: PEFT, a checkpoint, or transformers of another year.

Names differ in what leads to the layers (model., transformer., model.language_model., base_model.model.), and agree
from the list of layers on. What is in no layer is known by its last word.
"""


def tail(module: str) -> str:
    """transformer.h.0.attn.c_attn -> h.0.attn.c_attn; model.embed_tokens -> embed_tokens."""
    words = module.split(".")
    first = next((index for index, word in enumerate(words) if word.isdigit()), None)
    return words[-1] if first is None else ".".join(words[max(first - 1, 0) :])
