"""The numbers among the sampling parameters, with their defaults, ranges and help texts.

SamplingParams checks values with this table. The command line uses its help texts and defaults, and the server's fields
use its bounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SamplingNumber:
    """One parameter.

    Args:
        default: the default value; None is allowed only if it is the default.
        low: the minimum. If it is an int, values are whole numbers.
        high: the maximum; None for no bound.
        help: the help text of the command line.
        above: whether `low` itself is refused.
        served: the minimum and maximum that the server accepts, if they differ.
    """

    default: float | None
    low: float
    high: float | None
    help: str = ""
    above: bool = False
    served: tuple[float, float] | None = None

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int)

    def refusal(self, value: object) -> str | None:
        """The expected values, in words; None if the value is allowed."""
        if value is None and self.default is None:
            return None
        kinds = int if self.is_whole else (int, float)
        if isinstance(value, kinds) and not isinstance(value, bool) and self._holds(value):
            return None
        upper = " up" if self.high is None else f" to {self.high:g}"
        return f"a {'whole ' if self.is_whole else ''}number {'above' if self.above else 'from'} {self.low:g}{upper}"

    def bounds(self) -> dict[str, Any]:
        """The range that the server accepts, as keywords of a pydantic Field."""
        low, high = self.served or (self.low, self.high)
        finite = {} if self.is_whole else {"allow_inf_nan": False}
        return {"gt" if self.above and self.served is None else "ge": low, "le": high, **finite}

    def _holds(self, value: Any) -> bool:
        is_high_enough = value > self.low if self.above else value >= self.low
        return bool(is_high_enough and (self.high is None or value <= self.high))


_LONGEST = 2**31

SAMPLING_NUMBERS: Mapping[str, SamplingNumber] = {
    "max_tokens": SamplingNumber(128, 0, None, "tokens to generate", served=(0, _LONGEST)),
    "min_tokens": SamplingNumber(0, 0, None, served=(0, _LONGEST)),
    "temperature": SamplingNumber(0.0, 0.0, 1e6, "temperature; 0 is greedy", served=(0.0, 2.0)),
    # The server takes 0 and -1 for None.
    "top_k": SamplingNumber(None, 1, None, "sample from the k most likely tokens", served=(-1, _LONGEST)),
    "top_p": SamplingNumber(1.0, 0.0, 1.0, "sample from the smallest set of tokens with this probability", above=True),
    "min_p": SamplingNumber(0.0, 0.0, 1.0, "drop tokens below this share of the largest probability"),
    "typical_p": SamplingNumber(1.0, 0.0, 1.0, "sample from the most typical tokens with this probability", above=True),
    "repetition_penalty": SamplingNumber(
        1.0, 0.0, 1e6, "divides the logits of tokens in the prompt or output", above=True, served=(0.01, 100.0)
    ),
    "presence_penalty": SamplingNumber(
        0.0, -1e6, 1e6, "subtracted once from the logit of every token already generated", served=(-2.0, 2.0)
    ),
    "frequency_penalty": SamplingNumber(
        0.0, -1e6, 1e6, "subtracted from the logit per occurrence of an already generated token", served=(-2.0, 2.0)
    ),
    "dry_multiplier": SamplingNumber(
        0.0, 0.0, 1e6, "DRY: subtracted from a token that continues a repetition; 0 disables it", served=(0.0, 100.0)
    ),
    "dry_base": SamplingNumber(1.75, 1.0, 1e3, "DRY: factor per further token of the repetition", served=(1.0, 100.0)),
    "dry_allowed_length": SamplingNumber(2, 1, 1000, "DRY: length of repetitions without penalty"),
    # The server takes -1 for None.
    "dry_penalty_last_n": SamplingNumber(
        None, 0, None, "DRY: number of last tokens to search; default: all", served=(-1, _LONGEST)
    ),
    "seed": SamplingNumber(None, 0, None, "seed of the sampling; default: random", served=(0, 2**63 - 1)),
    "n": SamplingNumber(1, 1, 256, served=(1, 128)),
    "best_of": SamplingNumber(None, 1, 256, served=(1, 128)),
    "beam_width": SamplingNumber(None, 1, 256),
    "length_penalty": SamplingNumber(1.0, -1e3, 1e3, served=(-100.0, 100.0)),
    "logprobs": SamplingNumber(None, 0, 128, served=(0, 20)),
    "prompt_logprobs": SamplingNumber(None, 0, 128, served=(0, 20)),
}


def sampling_default(name: str) -> Any:
    """The default of a parameter of the table."""
    return SAMPLING_NUMBERS[name].default
