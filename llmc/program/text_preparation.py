"""What a model was trained to read before the texts themselves, and how two of its vectors compare."""

from dataclasses import dataclass
from enum import Enum


class Similarity(Enum):
    """Of two vectors: the more alike, the larger. The last two are distances, negated."""

    COSINE = "cosine"
    DOT = "dot"
    EUCLIDEAN = "euclidean"
    MANHATTAN = "manhattan"


@dataclass(frozen=True)
class TextPrompt:
    """A text that stands before those of a kind, such as "query: " before questions."""

    name: str
    text: str


@dataclass(frozen=True)
class TextPreparation:
    """What becomes of a text before the tokenizer reads it. default_prompt: the name of the prompt of texts whose
    request names none; None is no prompt. lowercases: texts are put into lower case, prompts too."""

    prompts: tuple[TextPrompt, ...] = ()
    default_prompt: str | None = None
    lowercases: bool = False
