"""Text that an engine's model generates from prompts cut from a text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from llmc.errors import OptionError
from llmc.program import Limits
from llmc.runtime.engine import Engine
from llmc.runtime.sampling.sampling_params import SamplingParams

# Short ones: what a small model writes greedily begins to go round in circles, which teaches nothing.
_PROMPT_TOKENS, _WRITTEN_TOKENS = 24, 72
# Number of sequences generated between reports of progress.
_AT_ONCE = 64


@dataclass(frozen=True)
class Written:
    """A prompt and its generated continuation. tokens: those of a prompt and of its continuation. prompt: number of the
    prompt's tokens."""

    tokens: list[int]
    prompt: int


def begun(engine: Engine, limits: Limits, text: str, tokens: int, seed: int, *, chat: bool) -> list[list[int]]:
    """Prompts from places of the text, for sequences of `tokens` tokens in total.

    chat: each is a user's message in the model's chat template. Raises OptionError for a text that is too short, and
    for prompts that leave no room to write.
    """
    ids = engine.tokenize(text)
    prompt = min(_PROMPT_TOKENS, limits.max_model_len // 4)
    count = -(-tokens // (prompt + min(_WRITTEN_TOKENS, limits.max_model_len - prompt)))
    if len(ids) < 2 * prompt:
        raise OptionError(
            f"the text has {len(ids)} tokens, and a prompt takes {prompt}", at="--text", fix="give a longer text"
        )
    order = torch.randperm(len(ids) - prompt, generator=torch.Generator().manual_seed(seed))
    starts = [int(order[i % len(order)]) for i in range(count)]
    pieces = [ids[start : start + prompt] for start in starts]
    if not chat:
        return pieces
    conversations = [[{"role": "user", "content": engine.detokenize(piece)}] for piece in pieces]
    prompts = [engine.conversations.token_ids(messages) for messages in conversations]
    longest = max(map(len, prompts))
    if longest >= limits.max_model_len:
        raise OptionError(
            f"a prompt in the chat template takes {longest} tokens, and the engine's sequences {limits.max_model_len}",
            at="--chat",
            fix=f"build the engine for longer ones: --max-model-len {longest + _WRITTEN_TOKENS}",
        )
    return prompts


def written(
    engine: Engine, asked: Sequence[list[int]], temperature: float, seed: int, advance: Callable[[int], None]
) -> list[Written]:
    """The prompts with the engine's continuations. advance: called with the number of generated sequences."""
    room = engine.limits.max_model_len - max(map(len, asked))
    sequences: list[Written] = []
    for first in range(0, len(asked), _AT_ONCE):
        prompts = list(asked[first : first + _AT_ONCE])
        places = range(first, first + len(prompts))
        most = min(_WRITTEN_TOKENS, room)
        params = [SamplingParams(max_tokens=most, temperature=temperature, seed=seed + i) for i in places]
        completions = engine.generate(prompts, params)
        pairs = zip(prompts, completions, strict=True)
        sequences += [Written(prompt + list(c.token_ids), len(prompt)) for prompt, c in pairs if c.token_ids]
        advance(len(prompts))
    return sequences
