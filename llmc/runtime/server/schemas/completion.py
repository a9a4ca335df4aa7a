"""The body of POST /v1/completions."""

from typing import Annotated

from pydantic import Field

from llmc.runtime.server.schemas.sampling_fields import SamplingFields
from llmc.runtime.server.schemas.token_fields import TokenId, number

MAX_PROMPTS = 1024
# Maximum over all prompts: the event loop creates each of them, and 1024 delay other requests by at most 0.1 s.
MAX_SEQUENCES = 1024
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(SamplingFields):
    """The body of /v1/completions.

    prompt: a text, several, token ids, or several lists of them. echo: the prompt comes before the output.
    """

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    best_of: int | None = number("best_of")
    echo: bool | None = False
    logprobs: int | None = number("logprobs")
    suffix: str | None = None
    add_special_tokens: bool = True

    def sequences(self) -> int:
        """The number of outputs that are generated for all prompts, including those that best_of drops."""
        return len(self.prompts()) * max(self.n or 1, self.best_of or 1)

    def prompts(self) -> list[str | list[int]]:
        """The prompts: texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]
