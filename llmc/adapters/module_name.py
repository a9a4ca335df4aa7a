"""Canonical names of modules in PEFT, in checkpoints and in all versions of transformers.

Names differ in the prefix of the layers (model., transformer., model.language_model., base_model.model.) and agree from
the list of layers on. A module outside of layers is identified by its last word.
"""


def tail(module: str) -> str:
    """The part of a module's name that all spellings share.

    transformer.h.0.attn.c_attn -> h.0.attn.c_attn; model.embed_tokens -> embed_tokens.
    """
    words = module.split(".")
    first = next((index for index, word in enumerate(words) if word.isdigit()), None)
    return words[-1] if first is None else ".".join(words[max(first - 1, 0) :])
