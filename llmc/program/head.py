"""The head of an engine that returns a row for a whole text instead of logits for the next token."""

from dataclasses import dataclass, field
from enum import Enum

from llmc.files.typed_json import LEFT_OUT
from llmc.program.text_preparation import Similarity, TextPreparation


class Task(Enum):
    """The kind of row that an engine returns for a text. EMBED: a vector. SCORE: one number, how well a text fits.
    CLASSIFY: one number per label."""

    EMBED = "embed"
    SCORE = "score"
    CLASSIFY = "classify"


class Pooling(Enum):
    """The tokens whose rows are pooled to one row of a text: the last, the first, or the mean of all."""

    LAST = "last"
    CLS = "cls"
    MEAN = "mean"


class Activation(Enum):
    """The function that turns a row into probabilities; IDENTITY leaves it unchanged."""

    IDENTITY = "identity"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True)
class Head:
    """The head of a model that computes a row per text. width: numbers per text, before Matryoshka cuts. whole_texts:
    all tokens of a text come in one step, since its row depends on tokens in ways that a KV cache does not hold.
    normalized: vectors are scaled to length 1 unless a request says otherwise. labels: the labels of the numbers of a
    classifier, in order. activation: the activation of a score's or a classifier's numbers. preparation: the
    preparation of texts that are embedded. similarity: the similarity that compares their vectors."""

    task: Task
    pooling: Pooling
    width: int
    whole_texts: bool
    normalized: bool = False
    activation: Activation = Activation.IDENTITY
    labels: tuple[str, ...] = ()
    preparation: TextPreparation = field(default=TextPreparation(), metadata=LEFT_OUT)
    similarity: Similarity = field(default=Similarity.COSINE, metadata=LEFT_OUT)

    def __repr__(self) -> str:
        return f"<Head {self.task.value}: {self.width} numbers per text, pooling {self.pooling.value}>"
