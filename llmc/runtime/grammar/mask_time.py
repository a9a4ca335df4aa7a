"""Processor time that a request's grammar may take, since all requests wait for the masks of one.

An ambiguous grammar may take longer with every token, and no limit on the parser's size prevents that.
"""

import time

from llmc.errors import RequestError

# A grammar of a hundred thousand characters takes 0.03 s a token.
_SECONDS, _SECONDS_A_TOKEN = 2.0, 0.05


class MaskTime:
    """The remaining time of a request, shared by its choices. seconds: initial budget; a_token: added per token."""

    def __init__(self, seconds: float = _SECONDS, a_token: float = _SECONDS_A_TOKEN) -> None:
        self._seconds = self._left = seconds
        self._a_token = a_token
        self._started = 0.0

    def start(self) -> None:
        """Count from now on the time of this thread."""
        self._started = time.thread_time()

    def stop(self) -> None:
        """Stop counting."""
        self._left -= time.thread_time() - self._started

    def next_token(self) -> None:
        """Add the time of one more token."""
        self._left += self._a_token

    def check(self, token: int) -> None:
        """Raise RequestError if nothing is left. token: the number of the output's token that is checked."""
        if self._left < 0:
            raise RequestError(
                f"the grammar needs more processor time than {self._seconds:g} s and {self._a_token:g} s per token at "
                f"token {token}",
                at="grammar",
                fix="simplify the grammar: it may be ambiguous, where a text can be read in many ways",
            )
