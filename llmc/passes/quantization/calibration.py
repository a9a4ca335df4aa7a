"""Calibration data: sequences of token ids from a text or token file."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llmc.errors import OptionError
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.program import Compression, parse_compression

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]
# Fewer say next to nothing of a model's activations.
_LEAST_TOKENS = 512
# Sequences that candidates of mixed precision are judged by.
_APART = 8


def sequences_and_apart(
    graph: ModelGraph, options: BuildOptions, data: ModelData
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """`calibration_sequences`, and after them some more to judge by. A file that has no more gives its last fifth; one
    of a single sequence gives it twice."""
    sequences = calibration_sequences(graph, options, data, _APART)
    count = min(options.calibration_sequences, max(1, len(sequences) - max(1, len(sequences) // 5)))
    return sequences[:count], sequences[count:] or sequences


def calibration_sequences(
    graph: ModelGraph, options: BuildOptions, data: ModelData, more: int = 0
) -> tuple[Tensor, ...]:
    """Return sequences of token ids, int64, from the beginning of the calibration text.

    There are `calibration_sequences` of `calibration_length` tokens each, and `more` further ones; fewer if the text is
    shorter. A sequence is at most as long as the model allows. Each sequence of a text begins with the special tokens
    that the tokenizer puts before a text, such as <bos>: activations without them are unlike those of a prompt. Token
    ids are cut as they are.

    Raises OptionError for a file that is missing, unreadable or too short, and for ids beyond the vocabulary.
    """
    check_text_is_given(options)
    path = Path(options.calibration or "")
    length = min(options.calibration_length, graph.info.max_positions or options.calibration_length)
    wanted = (options.calibration_sequences + more) * length
    ids, prefix = _ids(path, data, wanted)
    read = np.concatenate((prefix, ids))
    if len(read) < min(wanted, _LEAST_TOKENS):
        raise OptionError(
            f"the calibration text is too short: {len(read)} tokens, fewer than {min(wanted, _LEAST_TOKENS)}",
            at=path,
            fix="name a longer text; some 8,000 tokens are usual",
        )
    least, most = int(read.min()), int(read.max())
    if least < 0 or most >= graph.info.vocab_size:
        raise OptionError(
            f"token id {most if most >= graph.info.vocab_size else least} is not in the vocabulary of "
            f"{graph.info.vocab_size}",
            at=path,
            fix="tokenize the text with this model's tokenizer",
        )
    parts = torch.from_numpy(ids).split(max(1, length - len(prefix)))[: options.calibration_sequences + more]
    sequences = (torch.cat((torch.from_numpy(prefix), part)) for part in parts)
    return tuple(sequence for sequence in sequences if len(sequence) > 1)


def needs_text(options: BuildOptions) -> bool:
    """Whether a scheme or a policy of the options needs activations."""
    chosen = (options.quantization.needs_calibration, options.zeros.needs_calibration, not options.pruning.is_none)
    return any(chosen) or _compression_needs_text(options)


def _compression_needs_text(options: BuildOptions) -> bool:
    policy = parse_compression(options.kv_compression)
    return isinstance(policy, Compression) and policy.NEEDS_TEXT


def check_text_is_given(options: BuildOptions) -> None:
    """Raise OptionError if no calibration data is named."""
    if options.calibration is None:
        raise OptionError(
            f"{_what_looks(options)} needs activations, but no calibration text is given",
            at="calibration",
            fix="name a text file of the kind that the model will read: calibration=FILE",
        )


def _what_looks(options: BuildOptions) -> str:
    if not options.pruning.is_none:
        return f"prune={','.join(options.prune)}"
    if options.zeros.needs_calibration:
        return f"sparsity={','.join(options.sparsity)}"
    if options.quantization.needs_calibration:
        return f"quantize={','.join(options.quantize)}"
    return f"kv_compression={options.kv_compression}"


def read_calibration(path: Path) -> str | Ids:
    """A text as it is; token ids as one row. Raises OptionError for a file that is neither."""
    try:
        if path.suffix == ".npy":
            return _flat(np.load(path, allow_pickle=False), path)
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return _flat(np.asarray(json.loads(text)), path)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"cannot read the calibration data: {error}", at=path, fix="name a UTF-8 text, or ids as .json or .npy"
        ) from None
    return text


def _ids(path: Path, data: ModelData, wanted: int) -> tuple[Ids, Ids]:
    """The ids of the text without the special tokens before it, and these."""
    content = read_calibration(path)
    if not isinstance(content, str):
        return content, content[:0]
    if data.tokenizer is None:
        raise OptionError(
            "the model has no tokenizer.json for the calibration text",
            at=path,
            fix="give token ids: a .json list of whole numbers, or a .npy array",
        )
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(data.tokenizer))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # No token is longer than 32 characters on average, so that a whole library is not tokenized for a few thousand.
    encoded = tokenizer.encode(content[: 32 * wanted])
    ids, mask = np.asarray(encoded.ids, dtype=np.int64), encoded.special_tokens_mask
    own = mask.index(0) if 0 in mask else 0
    return ids[own:], ids[:own]


def _flat(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], path: Path) -> Ids:
    if not np.issubdtype(values.dtype, np.integer):
        raise OptionError(f"the calibration data are {values.dtype}, not whole numbers", at=path, fix="give token ids")
    return values.reshape(-1).astype(np.int64)
