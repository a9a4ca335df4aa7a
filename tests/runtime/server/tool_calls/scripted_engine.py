"""An engine that says what it is told: a tiny model whose next token follows from the position alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from llmc.program import Limits
from tests.runtime.tiny_engine import WIDTH, tiny_model, write_tiny_engine

END = "<|end_of_script|>"
LIMITS = Limits(max_batch_tokens=64, max_sequences=2, max_logit_rows=2, max_model_len=160, block_size=8)
# The prompt is one token, whatever the messages are: the template shows them, and the tokenizer drops them.
PROMPT = "<|prompt|>"
_SHOWN = "\x02{{ messages | tojson }}{{ tools | tojson if tools else '' }}\x03"
_DROPPED = Regex("\x02[^\x03]*\x03")
_LENGTH = 9


def write_scripted_engine(path: Path, script: str, special: Iterable[str], template: str = "") -> Path:
    """special: marks that are special tokens; the rest of the script is tokens of a few characters.

    template: what the chat template says without showing it.
    """
    marks = [mark for mark in dict.fromkeys(special) if mark in script]
    pieces = _pieces(script, marks)
    tokenizer = _tokenizer((END, PROMPT, *marks), [piece for piece in pieces if piece not in marks])
    file = path.with_suffix(".json")
    tokenizer.save(str(file))
    model = tiny_model(vocab=tokenizer.get_vocab_size())
    ids = [_id(tokenizer, text) for text in (*pieces, END)]
    model.weights.update(_weights(ids, tokenizer.get_vocab_size()))
    for name in ("embedding", "v"):
        model.weights[name].zero_()
    return write_tiny_engine(
        path,
        model=model,
        limits=LIMITS,
        eos=(ids[-1],),
        with_tokenizer=True,
        tokenizer=file,
        chat_template=f"{{# {template} #}}{_SHOWN}{PROMPT}",
    )


def _weights(ids: Sequence[int], vocab: int) -> dict[str, Tensor]:
    """Places in directions of their own, so that each one's token is the likeliest there."""
    assert len(ids) < LIMITS.max_model_len
    wanted = torch.tensor(ids)
    for seed in range(1000):
        generator = torch.Generator().manual_seed(seed)
        places = torch.randn((LIMITS.max_model_len, WIDTH), generator=generator)
        places = torch.nn.functional.normalize(places, dim=1)
        head = torch.zeros((vocab, WIDTH)).index_add(0, wanted, 9 * places[: len(ids)])
        if torch.equal((places[: len(ids)] @ head.T).argmax(1), wanted):
            return {"places": places, "head": head}
    raise AssertionError("the script has the same token too often")


def _pieces(script: str, marks: Sequence[str]) -> list[str]:
    """The script as tokens: marks, and between them texts of a few characters, as different as can be."""
    pieces: list[str] = []
    parts = re.split("|".join(map(re.escape, marks)), script) if marks else [script]
    between = re.findall("|".join(map(re.escape, marks)), script) if marks else []
    for i, part in enumerate(parts):
        start = 0
        while start < len(part):
            end = min(len(part), start + _LENGTH)
            while end < len(part) and part[start:end] in pieces:
                end += 1
            pieces.append(part[start:end])
            start = end
        pieces += between[i : i + 1]
    return pieces


def _tokenizer(special: Sequence[str], pieces: Sequence[str]) -> Tokenizer:
    """Bytes, the pieces, which no text is encoded as, and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [
        word for piece in pieces for word, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(piece)
    ]
    vocabulary = {text: i for i, text in enumerate(dict.fromkeys([*alphabet, *words]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.normalizer = normalizers.Replace(_DROPPED, "")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def _id(tokenizer: Tokenizer, piece: str) -> int:
    ((word, _),) = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(piece)
    token_id = tokenizer.token_to_id(piece)
    return token_id if token_id is not None else tokenizer.get_vocab()[word]
