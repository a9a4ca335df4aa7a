"""A user's function of the previous tokens and the next token's logits, called for every token of its request."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError, words_of
from llmc.runtime.sampling.written_tokens import Written

Row = npt.NDArray[np.float32]
# (ids of prompt and output, logits) or, as in vLLM, (ids of the prompt, ids of the output, logits); returns logits.
LogitsProcessor = Callable[[list[int], Row], Row] | Callable[[list[int], list[int], Row], Row]


@dataclass(frozen=True)
class CheckedProcessor:
    """A processor whose failures affect only its request. index: among the request's processors."""

    function: Callable[..., Any]
    index: int
    takes_prompt: bool

    @staticmethod
    def of(function: LogitsProcessor, index: int) -> "CheckedProcessor":
        """Wrap a function that SamplingParams has accepted."""
        return CheckedProcessor(function, index, argument_count(function) == 3)

    def __call__(self, scores: Row, written: Written) -> Row:
        """scores: [vocabulary], which the function may change and return. Raises RequestError."""
        ids = written.ids.tolist()
        split = written.prompt_tokens
        shape = scores.shape
        try:
            returned = (
                self.function(ids[:split], ids[split:], scores) if self.takes_prompt else self.function(ids, scores)
            )
        except Exception as error:
            raise self._failure(f"raised {type(error).__name__}: {words_of(error)}", "mend the function") from error
        fix = f"return the logits, a float32 array of shape {list(shape)}"
        if returned is None:
            raise self._failure("returned None", fix)
        try:
            # The function may keep what it returned, and what follows here changes the row.
            row = scores if returned is scores else np.array(returned, np.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._failure(
                f"returned a {type(returned).__name__} that is not an array: {words_of(error)}", fix
            ) from error
        if row.shape != shape:
            raise self._failure(f"returned an array of shape {list(row.shape)}", fix)
        wrong = np.isnan(row) | (row == np.inf)
        if wrong.any():
            token = int(wrong.argmax())
            raise self._failure(f"returned {row[token]} for token id {token}", "return finite logits, or -inf to ban")
        return row

    def _failure(self, what: str, fix: str) -> RequestError:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return RequestError(f"the logits processor {name} {what}", at=f"logits_processors[{self.index}]", fix=fix)


def argument_count(function: Callable[..., Any]) -> int | None:
    """2 or 3, what the function can be called with; 2 if both; None for neither."""
    try:
        signature = inspect.signature(function)
    except Exception:  # Some functions that are written in C have no signature, and the object may be a user's.
        return 2
    for count in (2, 3):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count
    return None
