"""When an output ends: one rule for choices and for beams."""

from dataclasses import dataclass
from typing import NamedTuple

from llmc.runtime.requests.request_output import FinishReason


class End(NamedTuple):
    """Why an output has ended. stop_reason: the stop string or stop token id, None for anything else."""

    finish_reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class Ending:
    """The conditions that end an output.

    eos_ids: end it without a stop_reason. stop_ids: end it as its stop_reason. max_length: maximum number of tokens of
    prompt and output. min_tokens: tokens of output before which neither these nor stop strings end it.
    """

    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    max_length: int
    min_tokens: int = 0

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an output, and may not come before min_tokens."""
        return self.eos_ids | self.stop_ids

    def may_stop(self, output: int) -> bool:
        """Whether an output may stop at its token of that number, from 1: the token and its text may be an end."""
        return output > self.min_tokens

    def after(self, token: int, length: int, prompt: int, stop_string: str | None, is_complete: bool) -> End | None:
        """Return why the output ends with `token`, the last of `length` tokens, `prompt` of them the prompt's; None if
        it does not.

        A stop string counts before a stop token, and both before the length. A grammar that lets nothing follow ends
        the output also before min_tokens, since no token may come.
        """
        if self.may_stop(length - prompt):
            if stop_string is not None:
                return End("stop", stop_string)
            if token in self.eos_ids:
                return End("stop")
            if token in self.stop_ids:
                return End("stop", token)
        if is_complete:
            return End("stop")
        return End("length") if length >= self.max_length else None
