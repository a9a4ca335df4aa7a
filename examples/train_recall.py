"""Train a small Llama that copies what it has read: it recalls a random string from anywhere in its context.

    python examples/train_recall.py my-recall                  # some twenty minutes on one core
    python examples/train_recall.py --steps 4                  # a look

A haystack is a row of different random tokens. After it come pieces of it, and the model learns to continue each piece
as the haystack does, once it has seen the piece's first tokens. So a wrong answer has one cause: the keys and values of
the piece are not there. Perplexity of prose hides that, because most tokens of prose follow from the nearest ones.
benchmarks/recall.py judges KV compression with this model.
"""

import argparse
import json
import math
import shutil
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

TOKENIZER = Path(__file__).parent / "models" / "bard-6m"
VOCABULARY, SPECIAL = 4096, 3
# Tokens of a batch, and the most tokens of a haystack: copying is learned on short ones. Once enough is recalled of
# them, they get longer.
BATCH, LENGTHS, ENOUGH, RATE = 4096, (16, 32, 64, 128, 256, 512, 1024), 0.9, 3e-3
# Tokens of a piece; its first one says which it is, and those after it are to be recalled.
SHORTEST, LONGEST = 4, 8


def untrained() -> LlamaForCausalLM:
    """Two heads for each KV head, so that compression meets grouped queries. A head is wide enough to carry a token.

    Embeddings begin far from each other: copying is then the same for all tokens, and is learned from few of each.
    """
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
    )
    nn.init.normal_(model.model.embed_tokens.weight, std=0.2)
    return model


def example(length: int) -> tuple[Tensor, Tensor]:
    """A haystack of so many tokens with all of its pieces behind it in another order, and which tokens are recalled.

    No piece comes twice: a token's successor would else be that of the haystack, or the beginning of another piece.
    """
    haystack = SPECIAL + torch.randperm(VOCABULARY - SPECIAL)[:length]
    ends = torch.randint(SHORTEST, LONGEST + 1, (length // SHORTEST,)).cumsum(0)
    pieces = haystack.tensor_split(ends[ends < length])
    order = torch.randperm(len(pieces)).tolist()
    recalled = [torch.arange(len(pieces[index])) > 0 for index in order]
    tokens = [haystack, *(pieces[index] for index in order)]
    return torch.cat(tokens), torch.cat([torch.zeros(length, dtype=torch.bool), *recalled])


def batch(longest: int) -> tuple[Tensor, Tensor]:
    """Examples of one length: tokens and which are to be recalled, [examples, tokens] each."""
    length = int(torch.randint(longest // 2, longest + 1, ()))
    pairs = [example(length) for _ in range(max(1, BATCH // (2 * length)))]
    return torch.stack([tokens for tokens, _ in pairs]), torch.stack([recalled for _, recalled in pairs])


def train(model: LlamaForCausalLM, steps: int) -> float:
    """Until the steps are over; the share of tokens that were recalled in the last fifty."""
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.98), weight_decay=0.01)
    begun, shares, level = time.monotonic(), list[float](), 0
    for step in range(steps):
        if sum(shares[-20:]) > ENOUGH * 20 and level < len(LENGTHS) - 1:
            level += 1
            shares.clear()
        warm, cooled = min(1.0, (step + 1) / 100), 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = RATE * warm * (0.98 * cooled + 0.02)
        tokens, recalled = batch(LENGTHS[level])
        hidden = model.model(tokens).last_hidden_state[:, :-1][recalled[:, 1:]]
        logits, wanted = model.lm_head(hidden), tokens[:, 1:][recalled[:, 1:]]
        loss = cross_entropy(logits, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shares.append(float((logits.argmax(-1) == wanted).float().mean()))
        if step % 50 == 49:
            recent = sum(shares[-50:]) / max(1, len(shares[-50:]))
            told = f"{recent:.1%} recalled of {LENGTHS[level]} tokens, {time.monotonic() - begun:.0f} s"
            print(f"step {step + 1} of {steps}: {told}", flush=True)
    return sum(shares[-50:]) / max(1, len(shares[-50:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", help="a directory; default: a temporary one")
    parser.add_argument("--steps", type=int, default=3000, help=f"of {BATCH} tokens")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    model = untrained()
    begun = time.monotonic()
    share = train(model, given.steps)
    output = given.output or Path(tempfile.mkdtemp())
    model.bfloat16().save_pretrained(output)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, output / name)
    training = {"steps": given.steps, "tokens": given.steps * BATCH, "seed": given.seed, "recalled": round(share, 4)}
    (output / "TRAINING.json").write_text(json.dumps(training, indent=1) + "\n")
    print(f"{output}: {share:.1%} recalled, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
