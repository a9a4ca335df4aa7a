"""A GGUF file's tokenizer in the tokenizers library's form: byte-level BPE, and SentencePiece's with bytes to fall back
on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from llmc.errors import CheckpointError
from llmc.frontends.gguf.metadata import Metadata
from llmc.frontends.gguf.pre_tokenizers import CUTS
from llmc.frontends.gguf.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NO_VOCABULARY = ("no_vocab", "none")
_SPACE = "▁"


def tokenizer_of(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer of a vocabulary. Raises CheckpointError for an unsupported kind of tokenizer or
    pre-tokenizer."""
    from tokenizers import AddedToken

    metadata = vocabulary.said
    name = metadata.text("model")
    make = _MODELS.get(name)
    if make is None:
        raise _not_read(metadata, "model", name, _MODELS)
    try:
        tokenizer = make(vocabulary)
    except CheckpointError:
        raise
    except Exception as error:  # The library raises a bare Exception for merges of missing tokens.
        raise CheckpointError(
            f"cannot make a tokenizer from the vocabulary: {error}", at=metadata.at, fix="convert the model again"
        ) from None
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in vocabulary.control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in vocabulary.defined])
    _add_ends(tokenizer, vocabulary)
    return tokenizer


def adds_beginning(metadata: Metadata) -> bool:
    """Whether a text begins with the token for that."""
    by_kind = metadata.text("model") == "llama" or (
        (cut := CUTS.get(metadata.text("pre", default=""))) is not None and cut.begins
    )
    return metadata.flag("add_bos_token", default=by_kind)


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    metadata = vocabulary.said
    name = metadata.text("pre", default="gpt-2")
    cut = CUTS.get(name)
    if cut is None:
        raise _not_read(metadata, "pre", name, CUTS)
    tokenizer = Tokenizer(BPE(vocabulary.ids, _merges(vocabulary), ignore_merges=cut.whole_first))
    if cut.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytewise])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(vocabulary: Vocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    metadata = vocabulary.said
    unknown = vocabulary.special("unknown")
    merges = _merges_by_score(vocabulary)
    model = BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    begins_with_space = metadata.flag("add_space_prefix", default=True)
    before = [normalizers.Prepend(_SPACE)] if begins_with_space else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if begins_with_space else []
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


_MODELS: Mapping[str, Callable[[Vocabulary], Tokenizer]] = MappingProxyType(
    {"gpt2": _byte_level, "llama": _sentence_piece}
)


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Parse merges, which are two tokens with a space between them. The first token may also contain spaces, except at
    its beginning.

    The library aborts the process for merges of tokens that are not in the vocabulary.
    """
    merges: list[tuple[str, str]] = []
    metadata, ids = vocabulary.said, vocabulary.ids
    for merge in metadata.texts("merges"):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            raise metadata.error("merges", merge, "two tokens that make a third, with a space between")
        merges.append((left, right))
    return merges


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that make a third, as merges. Pairs for the token with the highest score come first, as
    SentencePiece joins them. For one token, the pair with the longest first part comes first. Source: transformers'
    conversion of such models."""
    scores = vocabulary.said.numbers("scores")
    ids, added = vocabulary.ids, vocabulary.added
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, number in ids.items():
        if token in added or number >= len(scores):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids and left not in added and right not in added:
                ranked.append((scores[number], len(left), len(right), left, right))
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return [(left, right) for *_, left, right in ranked]


def _add_ends(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """The tokens that a text begins and ends with, where the file asks for them."""
    from tokenizers import processors

    metadata = vocabulary.said
    first = vocabulary.special("bos") if adds_beginning(metadata) else None
    last = vocabulary.special("eos") if metadata.flag("add_eos_token", default=False) else None
    around = [token for token in (first, last) if token is not None and token in vocabulary.ids]
    if not around:
        return
    single = " ".join(part for part in (first, "$A", last) if part)
    pair = single + " " + " ".join(part for part in (first, "$B:1", last) if part)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(token, vocabulary.ids[token]) for token in dict.fromkeys(around)]
    )


def _not_read(metadata: Metadata, key: str, value: str, known: Mapping[str, object]) -> CheckpointError:
    return CheckpointError(
        f"tokenizers of the kind {metadata.prefix}{key} = {value!r:.40} are not supported",
        at=metadata.at,
        fix=f"llmc reads {', '.join(known)}; build others from their safetensors checkpoints",
    )
