"""Which tokens graphs are compared on, and what is not a list of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmc.debug.sample_tokens import Sample, sample_tokens
from llmc.errors import OptionError

TOKENIZER = Path(__file__).parent.parent.parent / "examples" / "models" / "bard-draft" / "tokenizer.json"


def test_prose_by_default(tmp_path: Path) -> None:
    ids = sample_tokens(TOKENIZER, 4096)
    assert len(ids) == 32 and len(set(ids)) > 16
    (tmp_path / "text.txt").write_text("The king is dead, long live the king.")
    assert sample_tokens(TOKENIZER, 4096, Sample(tmp_path / "text.txt", length=5)) != ids[:5]


def test_random_ids_without_a_tokenizer() -> None:
    nine = sample_tokens(None, 50, Sample(length=9))
    assert len(nine) == 9 and nine == sample_tokens(None, 50, Sample(length=9))
    assert nine != sample_tokens(None, 50, Sample(length=9, seed=1))
    assert len(sample_tokens(None, 50, Sample(length=64), 7)) == 7


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokens": "1,two"}, "is not a list of token ids"),
        ({"tokens": "1"}, "1 token"),
        ({"tokens": "1,50"}, "token id 50 is not below the vocabulary's 50"),
        ({"tokens": "1,2,3,4,5"}, "5 tokens, the model takes 4"),
        ({"text": Path("/no/such/file")}, "cannot read the text file"),
    ],
)
def test_bad_input(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says) as error:
        sample_tokens(TOKENIZER, 50, Sample(**options), 4)
    assert error.value.fix is not None


def test_a_text_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no tokenizer\.json"):
        sample_tokens(tmp_path / "tokenizer.json", 50, Sample(tmp_path / "text.txt"))
