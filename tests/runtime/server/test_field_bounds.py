"""The least and the most that the fields of a request may be, which are promised and so written down here again."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from llmc.runtime.server.schemas.token_fields import TokenFields

# With bounds that may be reached themselves.
REACHED = {
    "temperature": (0.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "top_k": (-1, 2**31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
    "dry_allowed_length": (1, 1000),
    "dry_penalty_last_n": (-1, 2**31),
    "min_tokens": (0, 2**31),
    "seed": (0, 2**63 - 1),
    "priority": (-(2**31), 2**31 - 1),
}
# Above zero, up to the bound.
ABOVE_ZERO = {"top_p": 1.0, "typical_p": 1.0, "deadline_seconds": 86_400.0}


@pytest.mark.parametrize("name", REACHED)
def test_bounds_may_be_reached_and_not_passed(name: str) -> None:
    least, most = REACHED[name]
    step = 1 if isinstance(least, int) else 0.001
    for value in (least, most):
        assert getattr(TokenFields.model_validate({name: value}), name) == value
    for value in (least - step, most + step):
        with pytest.raises(ValidationError, match=name):
            TokenFields.model_validate({name: value})


@pytest.mark.parametrize("name", ABOVE_ZERO)
def test_zero_is_too_little(name: str) -> None:
    most = ABOVE_ZERO[name]
    for value in (1e-9, most):
        assert getattr(TokenFields.model_validate({name: value}), name) == value
    for value in (0.0, most + 0.001):
        with pytest.raises(ValidationError, match=name):
            TokenFields.model_validate({name: value})


def test_lists_and_texts_may_be_so_long() -> None:
    longest: dict[str, list[Any] | dict[str, float]] = {
        "stop": ["x" * 1000] * 16,
        "bad_words": ["x" * 200] * 1024,
        "dry_sequence_breakers": ["x" * 200] * 64,
        "stop_token_ids": [0] * 128,
        "logit_bias": {str(token): 100.0 for token in range(1024)},
    }
    for name, value in longest.items():
        TokenFields.model_validate({name: value})
        longer = {**value, "1024": -100.0} if isinstance(value, dict) else [*value, value[0]]
        with pytest.raises(ValidationError, match=name):
            TokenFields.model_validate({name: longer})
