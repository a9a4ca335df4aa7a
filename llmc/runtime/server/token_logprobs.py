"""A token's log-probabilities as chat and responses give them."""

from collections.abc import Callable, Sequence
from typing import Any

from llmc.runtime.requests.request_output import TokenLogprobs
from llmc.runtime.server.token_texts import TokenTexts

Json = dict[str, Any]


def logprob_json(texts: TokenTexts, entry: TokenLogprobs, top: int, text: Callable[[int], str] | None = None) -> Json:
    """The token, and the `top` likeliest in its place. text: how a token is shown, default its text."""
    shown = text or texts.text

    def token(identity: int, logprob: float) -> Json:
        return {"token": shown(identity), "logprob": logprob, "bytes": list(texts.utf8(identity))}

    return {
        **token(entry.token_id, entry.logprob),
        "top_logprobs": [token(identity, logprob) for identity, logprob in entry.top[:top]],
    }


def prompt_logprobs_json(texts: TokenTexts, logprobs: Sequence[TokenLogprobs | None]) -> list[Json | None]:
    """Log-probabilities of a prompt's tokens in vLLM's form: by token id, with rank and text."""
    return [None if entry is None else _ranked_json(texts, entry) for entry in logprobs]


def _ranked_json(texts: TokenTexts, entry: TokenLogprobs) -> Json:
    tokens = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)}
    tokens[entry.token_id] = (entry.logprob, entry.rank)
    return {
        str(token): {"logprob": logprob, "rank": rank, "decoded_token": texts.text(token)}
        for token, (logprob, rank) in tokens.items()
    }
