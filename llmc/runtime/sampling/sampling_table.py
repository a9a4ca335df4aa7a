"""The numbers among the sampling parameters, each once: its default, what it may be, and what it does, in a line.

SamplingParams checks by this table. The command line takes its help and its defaults from it, and the server's fields
their bounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SamplingNumber:
    """One parameter.

    Args:
        default: the value of a request that does not say; None is allowed only where it is the default.
        low: the least value. Where it is an int, values are whole numbers.
        high: the greatest value; None for no bound.
        help: for the command line.
        above: whether `low` itself is refused.
        served: the least and the greatest value that the server takes, where these are others.
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
    "temperature": SamplingNumber(0.0, 0.0, 1e6, "0 is greedy", served=(0.0, 2.0)),
    # The server takes 0 and -1 for None.
    "top_k": SamplingNumber(None, 1, None, "sample from the k likeliest", served=(-1, _LONGEST)),
    "top_p": SamplingNumber(1.0, 0.0, 1.0, "sample from the smallest set with this probability", above=True),
    "min_p": SamplingNumber(0.0, 0.0, 1.0, "drop tokens below this share of the likeliest's probability"),
    "typical_p": SamplingNumber(1.0, 0.0, 1.0, "sample from the most typical ones with this probability", above=True),
    "repetition_penalty": SamplingNumber(
        1.0, 0.0, 1e6, "divides the logits of tokens seen before", above=True, served=(0.01, 100.0)
    ),
    "presence_penalty": SamplingNumber(0.0, -1e6, 1e6, "taken once from tokens generated before", served=(-2.0, 2.0)),
    "frequency_penalty": SamplingNumber(
        0.0, -1e6, 1e6, "taken per occurrence from tokens generated before", served=(-2.0, 2.0)
    ),
    "dry_multiplier": SamplingNumber(
        0.0, 0.0, 1e6, "DRY: taken from a token that would go on repeating; 0 is off", served=(0.0, 100.0)
    ),
    "dry_base": SamplingNumber(1.75, 1.0, 1e3, "times this for every token more that is repeated", served=(1.0, 100.0)),
    "dry_allowed_length": SamplingNumber(2, 1, 1000, "repetitions shorter than this cost nothing"),
    # The server takes -1 for None.
    "dry_penalty_last_n": SamplingNumber(
        None, 0, None, "how many tokens it looks back; default: all", served=(-1, _LONGEST)
    ),
    "seed": SamplingNumber(None, 0, None, "of the sampling", served=(0, 2**63 - 1)),
    "n": SamplingNumber(1, 1, None, served=(1, 128)),
    "best_of": SamplingNumber(None, 1, None, served=(1, 128)),
    "beam_width": SamplingNumber(None, 1, None),
    "length_penalty": SamplingNumber(1.0, -1e3, 1e3, served=(-100.0, 100.0)),
    "logprobs": SamplingNumber(None, 0, None, served=(0, 20)),
    "prompt_logprobs": SamplingNumber(None, 0, None, served=(0, 20)),
}


def sampling_default(name: str) -> Any:
    """The default of a parameter of the table."""
    return SAMPLING_NUMBERS[name].default
