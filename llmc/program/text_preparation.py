"""The preparation of texts for a model: prompts in front of them, lower case, and the similarity of its vectors."""

from dataclasses import dataclass
from enum import Enum


class Similarity(Enum):
    """The similarity of two vectors; larger means more similar. The last two are negated distances."""

    COSINE = "cosine"
    DOT = "dot"
    EUCLIDEAN = "euclidean"
    MANHATTAN = "manhattan"


@dataclass(frozen=True)
class TextPrompt:
    """A prefix for texts of a kind, such as "query: " for questions."""

    name: str
    text: str


@dataclass(frozen=True)
class TextPreparation:
    """Changes to a text before tokenization. default_prompt: the name of the prompt for requests that name none; None
    means no prompt. lowercases: texts and prompts are converted to lower case."""

    prompts: tuple[TextPrompt, ...] = ()
    default_prompt: str | None = None
    lowercases: bool = False
