"""Results of generation: completions with their choices, or the pieces of a stream."""

from dataclasses import dataclass, field

from llmc.runtime.requests.request_output import FinishReason, TokenLogprobs

# Characters of a text that are worth a look.
_SHOWN = 60


@dataclass(frozen=True)
class Choice:
    """One continuation of a prompt.

    Attributes:
        text: The text without special tokens, cut before a stop string; empty if the engine has no tokenizer.
        token_ids: All generated tokens, including a stop token.
        finish_reason: "stop" for a stop token or string, or the end of a grammar; "length" for max_tokens or the
            engine's max_model_len.
        stop_reason: The stop string or stop token id.
        logprobs: One per token, if requested.
        cumulative_logprob: Their sum, if known.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None

    def __repr__(self) -> str:
        return (
            f"Choice(text={_beginning(self.text)}, {len(self.token_ids)} tokens, finish_reason={self.finish_reason!r})"
        )


@dataclass(frozen=True)
class Completion:
    """The result for one prompt.

    Attributes:
        choices: `params.n` choices. `text`, `token_ids` and `finish_reason` are those of the first.
        prompt_tokens: Number of tokens in the prompt.
        cached_tokens: Number of them that were found in the prefix cache.
        prompt_logprobs: If requested, None for the first token and one entry for each other token.
    """

    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int = field(default=0, compare=False)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """The finish reason of the first choice."""
        return self.choices[0].finish_reason

    def __repr__(self) -> str:
        first = repr(self.choices[0]).removeprefix("Choice(")[:-1]
        return f"Completion({first}, choices={len(self.choices)}, prompt_tokens={self.prompt_tokens})"


@dataclass(frozen=True)
class Piece:
    """A piece of streamed output. It has whole characters only, so it may contain several tokens.

    Attributes:
        text: The new text.
        token_ids: The tokens since the previous piece.
        tokens: Number of tokens generated until now.
        finish_reason: Set in the last piece only.
    """

    text: str
    token_ids: tuple[int, ...]
    tokens: int
    finish_reason: FinishReason | None


def _beginning(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
