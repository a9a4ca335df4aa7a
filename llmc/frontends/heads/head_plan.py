"""The plan of a head that returns one row per text: from the config, from sentence-transformers, or from build
options."""

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from llmc.errors import CaptureError
from llmc.frontends.heads.sentence_modules import DenseModule, sentence_modules
from llmc.options import BuildOptions
from llmc.program import Activation, Head, Pooling, Task


@dataclass(frozen=True)
class HeadPlan:
    """The plan of a model's head. head: the engine's record, except its width and whether texts come whole,
    which follow from the graph. dense: products after the pooling. max_length: maximum tokens of a text, if lower than
    the model's own limit. separator: the token after which the second text of a pair begins; None if texts have no
    segments."""

    head: Head
    dense: tuple[DenseModule, ...] = ()
    max_length: int | None = None
    separator: int | None = None


def head_plan(task: Task, model: Any, options: BuildOptions, directory: Path | None = None) -> HeadPlan:
    """The plan for a transformers model. directory: where modules.json may be. Raises CaptureError, CheckpointError."""
    if task is not Task.EMBED:
        return _of_classifier(task, model, options, directory)
    modules = None if directory is None or options.pooling != "auto" else sentence_modules(directory)
    if modules is not None:
        return HeadPlan(modules.head, modules.dense, modules.max_length)
    requested = None if options.pooling == "auto" else Pooling(options.pooling)
    pooling = requested or (Pooling.LAST if is_causal(model) else Pooling.MEAN)
    return HeadPlan(Head(task, pooling, width=0, whole_texts=False, normalized=True))


def is_causal(model: Any) -> bool:
    """Whether each token of a model sees those before it only: a model is if its layers' attentions do not deny it."""
    return all(getattr(module, "is_causal", True) is not False for module in model.modules())


def _of_classifier(task: Task, model: Any, options: BuildOptions, directory: Path | None) -> HeadPlan:
    config = model.config
    labels = tuple(str(config.id2label[key]) for key in sorted(config.id2label))
    if task is Task.SCORE and len(labels) != 1:
        raise CaptureError(
            f"a model that scores gives one number, and this one has {len(labels)} labels",
            at=type(model).__name__,
            fix="build it with task=classify",
        )
    if options.pooling != "auto":
        raise CaptureError(
            "a classifier pools as its own head does", at=f"pooling={options.pooling}", fix="leave it out"
        )
    named = getattr(config, "classifier_pooling", None)
    pooling = Pooling.LAST if hasattr(model, "score") else Pooling(named) if named in ("cls", "mean") else Pooling.CLS
    segments = getattr(config, "type_vocab_size", None) or 0
    separator = pair_separator(directory, segments) if task is Task.SCORE and segments > 1 else None
    activation = _activation(config, len(labels))
    head = Head(task, pooling, width=0, whole_texts=False, activation=activation, labels=labels)
    return HeadPlan(head, separator=separator)


def _activation(config: Any, labels: int) -> Activation:
    """Return the activation that a cross-encoder's config names, or that of the problem for which it was trained."""
    settings = getattr(config, "sentence_transformers", None)
    named = settings.get("activation_fn") if isinstance(settings, dict) else None
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    if isinstance(named, str):
        name = named.rpartition(".")[2]
        if name not in ("Identity", "Sigmoid", "Softmax"):
            raise CaptureError(
                f"the activation {named} of the scores is not known", at="config.json", fix="use Identity or Sigmoid"
            )
        return Activation(name.lower())
    if getattr(config, "problem_type", None) == "regression":
        return Activation.IDENTITY
    is_independent = labels == 1 or getattr(config, "problem_type", None) == "multi_label_classification"
    return Activation.SIGMOID if is_independent else Activation.SOFTMAX


_FILE = "tokenizer.json"


def pair_separator(directory: Path | None, count: int) -> int | None:
    """The token whose number before another is that one's segment, of `count`; None if all tokens are of segment 0.

    Raises CaptureError where there is no tokenizer to ask, or segments are something else.
    """
    file = None if directory is None else directory / _FILE
    if file is None or not file.is_file():
        raise CaptureError(
            f"a pair of texts is distinguished by {count} segments, which follow from a tokenizer, and there is none",
            at=directory,
            fix=f"build from a model directory with its {_FILE}",
        )
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    pair = tokenizer.encode("a b", "c d")
    ids, segments = list(pair.ids), list(pair.type_ids)
    if not any(segments):
        return None
    separator = ids[-1]
    before = [0, *accumulate(int(token == separator) for token in ids[:-1])]
    if segments != [min(segment, count - 1) for segment in before]:
        raise CaptureError(
            f"the tokenizer gives a pair the segments {segments}, expected the next one after each {separator}",
            at=file,
            fix="build a reranker without token types, such as one of XLM-RoBERTa or ModernBERT",
        )
    return separator
