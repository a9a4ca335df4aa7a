"""Train the small Llama that copies repeated random strings, which is shipped as examples/models/copying.

    python -m benchmarks.train_copying_model my-copying
    python -m benchmarks.train_copying_model --share 0.01     # a look, with one hundredth of the steps

A text is a sequence of different random tokens in which some strings occur two or three times, at random places. After
the first token of a later occurrence the rest of the string is known. The loss counts mostly these tokens. Texts have
32 tokens at first, and up to 1,024 at the end.

The model needs a head that attends to the previous token, and one that looks for the same token earlier in the text (an
induction head; Olsson et al. 2022). The first one forms slowly by itself, so a second loss asks the first layer for the
previous token. The weights of this second output are not saved.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.copying_model import BEGINNING
from benchmarks.recall_tasks import SPECIAL

VOCABULARY = 1024
# Steps of one stage of the training after the other, and the lengths of their texts.
_STAGES = ((950, (32,)), (100, (64,)), (150, (128, 256, 512)), (500, (256, 512, 1024)))
_BATCH_TOKENS, _RATE = 2048, 3e-3
# Shares of the steps in which the learning rate rises, and in which it falls.
_RISING, _FALLING = 0.05, 0.25
# The weight of tokens that do not follow from those before. With no weight, the model predicts them with confidence.
_UNKNOWN = 0.1
# In texts of up to this length, the first layer learns to know the previous token.
_GUIDED = 64
# Tokens of a string.
_SHORTEST, _LONGEST = 3, 24


@dataclass(frozen=True)
class Training:
    """How a model was trained, and the share of tokens in later occurrences of strings that it copies.

    Args:
        steps: number of updates.
        tokens_seen: number of tokens in all batches.
        copied_512: share in texts of 512 tokens that it was not trained with.
        copied_1024: share in texts of 1,024 tokens that it was not trained with.
    """

    steps: int
    tokens_seen: int
    copied_512: float
    copied_1024: float


def main() -> None:
    """Train, measure and save."""
    given = parse_arguments()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    model, lengths = untrained(), list(stages(given.share))
    tokens = train(model, lengths, random.Random(given.seed))
    # The shares are those of the saved weights, which are in bf16.
    model.bfloat16()
    unseen = random.Random(given.seed + 1)
    shares = [copied(model, length, 32 * 1024 // length, unseen) for length in (512, 1024)]
    training = json.dumps(asdict(Training(len(lengths), tokens, *shares)), indent=1)
    print(training)
    with tempfile.TemporaryDirectory() as folder:
        output = given.output or Path(folder)
        model.save_pretrained(output)
        (output / "TRAINING.json").write_text(training + "\n")


def untrained() -> LlamaForCausalLM:
    """The model with random weights, in fp32."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=BEGINNING,
        eos_token_id=1,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config)


def stages(share: float) -> Iterator[int]:
    """The length of the texts of each step, if stages have `share` of their steps."""
    for steps, lengths in _STAGES:
        yield from (lengths[step % len(lengths)] for step in range(max(1, round(share * steps))))


def train(model: LlamaForCausalLM, lengths: list[int], chance: random.Random) -> int:
    """Update the model once per length. Returns the number of tokens in all batches."""
    previous = nn.Linear(model.config.hidden_size, VOCABULARY, bias=False)
    optimizer = torch.optim.AdamW([*model.parameters(), *previous.parameters()], _RATE, (0.9, 0.98), weight_decay=0.01)
    tokens = 0
    with Progress(console=Console(stderr=True)) as bars:
        bar = bars.add_task("", total=len(lengths))
        for step, length in enumerate(lengths):
            done = (step + 1) / len(lengths)
            for group in optimizer.param_groups:
                group["lr"] = _RATE * min(1.0, done / _RISING, (1.0 - done) / _FALLING)
            texts, known = batch(length, max(1, _BATCH_TOKENS // length), chance)
            loss, share = _loss(model, previous, texts, known)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            tokens += texts.numel()
            bars.update(bar, advance=1, description=f"{length} tokens, {share:.1%} copied")
    return tokens


def _loss(model: LlamaForCausalLM, previous: nn.Linear, texts: Tensor, known: Tensor) -> tuple[Tensor, float]:
    """The loss of a batch, and the share of known tokens that the model copies."""
    out = model(texts, output_hidden_states=True)
    logits, wanted = out.logits[:, :-1].flatten(0, 1), texts[:, 1:].flatten()
    losses, is_known = cross_entropy(logits, wanted, reduction="none"), known[:, 1:].flatten()
    loss = losses[is_known].mean() + _UNKNOWN * losses[~is_known].mean()
    if texts.shape[1] <= _GUIDED:
        after_first = out.hidden_states[1][:, 1:]
        guesses = previous(rms_norm(after_first, after_first.shape[-1:]))
        loss = loss + cross_entropy(guesses.flatten(0, 1), texts[:, :-1].flatten())
    return loss, _share(logits, wanted, is_known)


@torch.inference_mode()
def copied(model: LlamaForCausalLM, length: int, count: int, chance: random.Random) -> float:
    """The share of known tokens that the model copies in `count` texts of `length` tokens."""
    texts, known = batch(length, count, chance)
    return _share(model(texts).logits[:, :-1].flatten(0, 1), texts[:, 1:].flatten(), known[:, 1:].flatten())


def _share(logits: Tensor, wanted: Tensor, is_known: Tensor) -> float:
    return (logits.argmax(-1) == wanted)[is_known].float().mean().item()


def batch(length: int, count: int, chance: random.Random) -> tuple[Tensor, Tensor]:
    """Texts, and which of their tokens are known from those before: [count, length] both."""
    texts, known = zip(*(text(length, chance) for _ in range(count)), strict=True)
    return torch.tensor(texts), torch.tensor(known)


def text(length: int, chance: random.Random) -> tuple[list[int], list[bool]]:
    """A text with strings that occur again, and which of its tokens are known from those before."""
    drawn = iter(chance.sample(range(SPECIAL, VOCABULARY), min(length, VOCABULARY - SPECIAL)))
    room = round(chance.uniform(0.5, 0.9) * length)
    longest = max(_SHORTEST + 1, min(_LONGEST, length // 5))
    pieces = list[list[int]]()
    while room > 0:
        string, times = [next(drawn) for _ in range(chance.randint(_SHORTEST, longest))], chance.choice((2, 2, 3))
        pieces += [string] * times
        room -= len(string) * times
    # Tokens between the strings occur once. Each of them is a piece.
    pieces += [[next(drawn)] for _ in range(length - 1 - sum(map(len, pieces)))]
    chance.shuffle(pieces)
    tokens, known, seen = [BEGINNING], [False], set[int]()
    for piece in pieces:
        tokens += piece
        known += [at > 0 and piece[0] in seen for at in range(len(piece))]
        seen.add(piece[0])
    return tokens[:length], known[:length]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", help="a directory; default: a temporary one")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
