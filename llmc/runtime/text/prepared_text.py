"""A text as the model was trained to read it: after its prompt, in lower case. Token ids are taken as they are.

As sentence-transformers does in `encode`, `encode_query` and `encode_document`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from llmc.errors import RequestError
from llmc.program import TextPreparation

# The names that prompts of queries and of documents go by, the first that a model has.
QUERY, DOCUMENT = ("query",), ("document", "passage", "corpus")


def known_prompt(preparation: TextPreparation, names: Iterable[str]) -> str | None:
    """The first of these names that a prompt has; None is the default prompt."""
    known = {prompt.name for prompt in preparation.prompts}
    return next((name for name in names if name in known), None)


def prepared(preparation: TextPreparation, prompt: Any, name: str | None = None) -> Any:
    """Put the model's prompt before a text.

    name: the name of the prompt; None is the model's default. Raises RequestError for a name that no prompt has.
    """
    named = preparation.default_prompt if name is None else name
    prompts = {template.name: template.text for template in preparation.prompts}
    if named is not None and named not in prompts:
        raise RequestError(
            f"the model has no prompt {named!r:.60}; it has {', '.join(map(repr, prompts)) or 'none'}",
            at="prompt_name",
            fix="give one of those, or add the prefix to the text yourself",
        )
    if isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None and isinstance(prompt.get("prompt"), str):
        return {**prompt, "prompt": prepared(preparation, prompt["prompt"], name)}
    if not isinstance(prompt, str):
        return prompt
    text = prompts.get(named, "") + prompt if named is not None else prompt
    return text.lower() if preparation.lowercases else text
