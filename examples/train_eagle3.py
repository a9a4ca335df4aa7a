"""Train an EAGLE-3 draft for a model on what the model itself writes, in the published format.

    python examples/train_eagle3.py my-eagle3                      # some minutes
    python examples/train_eagle3.py --sequences 32 --steps 10      # a look

A row of the draft reads three of the model's hidden states after a token, and the next token, and says what may come
after that; for further drafts its own state takes theirs. So it is trained as it is used (Li et al. 2025, "EAGLE-3:
training-time test"): each row drafts three tokens in a row, from its own states, against what the model says of them.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import embedding, log_softmax, silu
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import llmc

MODEL = Path(__file__).parent / "models" / "bard-6m"
# Hidden states before these layers; the last number is that of all layers: what comes after them.
TAPS = (2, 4, 6)
HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY = 4, 2, 64, 512, 1024
EPS, THETA = 1e-6, 10000.0
# Tokens that each row drafts in training, and what each one counts of the one before it.
DRAFTS, DECAY = 3, 0.8
LENGTH, WINDOW, BATCH, RATE = 256, 132, 6, 2e-3


class Attention(nn.Module):
    """Of rows that see the model's tokens before them, and their own drafts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * width, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(2 * width, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(2 * width, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, width, bias=False)

    def forward(self, x: Tensor, positions: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x: [batch, rows, 2 · width]. seen: keys and values of the drafts before, the first of which all later rows
        see, too; those of this one are added."""
        q = rotated(self.q_proj(x).unflatten(-1, (HEADS, HEAD_DIM)), positions)
        k = rotated(self.k_proj(x).unflatten(-1, (KV_HEADS, HEAD_DIM)), positions)
        v = self.v_proj(x).unflatten(-1, (KV_HEADS, HEAD_DIM))
        group = HEADS // KV_HEADS
        seen.append((k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
        (first_k, first_v), own = seen[0], seen[1:]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, first_k)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, -torch.inf)
        drafted = [torch.einsum("bqhd,bqhd->bhq", q, key)[..., None] for key, _ in own]
        weights = (torch.cat([scores, *drafted], -1) * HEAD_DIM**-0.5).softmax(-1)
        rows = x.shape[1]
        out = torch.einsum("bhqk,bkhd->bqhd", weights[..., :rows], first_v)
        for index, (_, value) in enumerate(own):
            out = out + weights[..., rows + index].transpose(1, 2)[..., None] * value
        return self.o_proj(out.flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A layer whose attention reads a token's embedding beside the hidden state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(width, EPS) for _ in range(3)
        )
        self.self_attn, self.mlp = Attention(width), Mlp(width)

    def forward(self, h: Tensor, e: Tensor, positions: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        h = h + self.self_attn(torch.cat((self.input_layernorm(e), self.hidden_norm(h)), -1), positions, seen)
        return h + self.mlp(self.post_attention_layernorm(h))


class Draft(nn.Module):
    """Its parameters have the published names. kept: the model's ids of its tokens, in order."""

    def __init__(self, model: LlamaForCausalLM, kept: Tensor) -> None:
        super().__init__()
        width = model.config.hidden_size
        self.fc = nn.Linear(len(TAPS) * width, width, bias=False)
        self.midlayer, self.norm = Layer(width), nn.RMSNorm(width, EPS)
        self.lm_head = nn.Linear(width, len(kept), bias=False)
        with torch.no_grad():
            # It begins as the model's last layer, norm and output matrix would go on.
            self.fc.weight.zero_()[:, -width:] = torch.eye(width)
            self.midlayer.self_attn.o_proj.weight *= 0.1
            self.midlayer.mlp.down_proj.weight *= 0.1
            self.norm.weight.copy_(model.model.norm.weight)
            self.lm_head.weight.copy_(model.lm_head.weight[kept])

    def forward(self, taps: Tensor, tokens: Tensor, embeddings: Tensor) -> list[Tensor]:
        """Logits of DRAFTS drafts by row: row i begins with the states after token i, and its draft s is of token
        i + 2 + s. taps: [batch, tokens, 3 · width]."""
        rows = tokens.shape[1] - 1 - DRAFTS
        h, seen, logits = self.fc(taps[:, :rows]), [], []
        for depth in range(DRAFTS):
            e = embedding(tokens[:, 1 + depth : 1 + depth + rows], embeddings)
            h = self.midlayer(h, e, torch.arange(rows) + depth, seen)
            logits.append(self.lm_head(self.norm(h)))
        return logits


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021) of [batch, rows, heads, HEAD_DIM]."""
    half = HEAD_DIM // 2
    angles = positions[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.split(half, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def written(model: LlamaForCausalLM, count: int) -> Tensor:
    """Sequences that the model writes: a half drawn as it means, a quarter each colder and greedily. [count, LENGTH]"""
    parts = []
    for temperature, share in ((1.0, 2), (0.7, 1), (0.0, 1)):
        begin = torch.randint(3, model.config.vocab_size, (count * share // 4, 1))
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        made = {"max_new_tokens": LENGTH - 1, "min_new_tokens": LENGTH - 1, "pad_token_id": model.config.eos_token_id}
        parts.append(model.generate(begin, attention_mask=torch.ones_like(begin), **made, **drawn)[:, :LENGTH])
    return torch.cat(parts)[torch.randperm(count // 4 * 4)]


@torch.no_grad()
def taught(model: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What the model says after each token, as probabilities, and the hidden states that a draft reads."""
    last: list[Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
    out = model(tokens, output_hidden_states=True)
    handle.remove()
    states = [*out.hidden_states[:-1], last[0]]
    return out.logits.softmax(-1), torch.cat([states[tap] for tap in TAPS], -1)


def train(draft: Draft, model: LlamaForCausalLM, sequences: Tensor, kept: Tensor, steps: int) -> None:
    """Towards the model's own probabilities of the tokens that the draft has."""
    optimizer = torch.optim.AdamW(draft.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        warm, cooled = min(1.0, step / 20), 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = RATE * warm * (0.98 * cooled + 0.02)
        begin = int(torch.randint(LENGTH - WINDOW, ()))
        tokens = sequences[torch.randint(len(sequences), (BATCH,)), begin : begin + WINDOW]
        probabilities, taps = taught(model, tokens)
        loss = torch.zeros(())
        for depth, logits in enumerate(draft(taps, tokens, model.model.embed_tokens.weight.detach())):
            wanted = probabilities[:, 1 + depth : 1 + depth + logits.shape[1], kept]
            loss = loss - DECAY**depth * (wanted * log_softmax(logits, -1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 19:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def agreement(draft: Draft, model: LlamaForCausalLM, sequences: Tensor, kept: Tensor) -> list[float]:
    """By draft, how often its likeliest token is the model's."""
    probabilities, taps = taught(model, sequences)
    likeliest = probabilities.argmax(-1)
    drafts = draft(taps, sequences, model.model.embed_tokens.weight)
    return [
        (kept[logits.argmax(-1)] == likeliest[:, 1 + depth : 1 + depth + logits.shape[1]]).float().mean().item()
        for depth, logits in enumerate(drafts)
    ]


def save(draft: Draft, model: LlamaForCausalLM, kept: Tensor, training: dict[str, object], output: Path) -> None:
    """model.safetensors, config.json and how it was trained."""
    output.mkdir(parents=True, exist_ok=True)
    is_kept = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    is_kept[kept] = True
    weights = {name: value.to(torch.bfloat16) for name, value in draft.state_dict().items()}
    save_file({**weights, "d2t": kept - torch.arange(len(kept)), "t2d": is_kept}, output / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": model.config.hidden_size,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": model.config.max_position_embeddings,
        "vocab_size": model.config.vocab_size,
        "draft_vocab_size": len(kept),
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
    }
    for name, content in (("config.json", config), ("TRAINING.json", training)):
        (output / name).write_text(json.dumps(content, indent=2) + "\n")


def show(draft: Path) -> None:
    """The draft at work: the same answers, and how many drafts came true."""
    prompts = ["KING RICHARD:", "My lord, ", "First Citizen:\nBefore we proceed"]
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder) / "eagle3.llmc"
        llmc.build(MODEL, engine, max_model_len=256, speculative=draft)
        with llmc.load(engine) as plain:
            answers = plain.generate(prompts, max_tokens=60, temperature=0.0)
        with llmc.load(engine, speculation={"method": "eagle3", "num_speculative_tokens": 3}) as drafting:
            again = drafting.generate(prompts, max_tokens=60, temperature=0.0)
    assert [each.choices[0].text for each in answers] == [each.choices[0].text for each in again]
    print("the same answers, to the last token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", help="a directory; default: a temporary one")
    parser.add_argument("--sequences", type=int, default=224, help=f"of {LENGTH} tokens, that the model writes")
    parser.add_argument("--steps", type=int, default=210)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    sequences = written(model, arguments.sequences)
    kept = torch.bincount(sequences.flatten(), minlength=model.config.vocab_size).topk(VOCABULARY).indices.sort().values
    draft, apart = Draft(model, kept), sequences[: max(4, arguments.sequences // 20)]
    train(draft, model, sequences[len(apart) :], kept, arguments.steps)
    found = [round(share, 3) for share in agreement(draft, model, apart, kept)]
    print("drafts that are the model's likeliest token:", ", ".join(f"{share:.3f}" for share in found))
    seen = arguments.steps * BATCH * WINDOW
    training = {"steps": arguments.steps, "tokens_seen": seen, "draft_tokens_in_a_row": DRAFTS}
    with tempfile.TemporaryDirectory() as folder:
        output = arguments.output or Path(folder) / "eagle3"
        save(draft, model, kept, {**training, "heldout_agreement": found}, output)
        show(output)


if __name__ == "__main__":
    main()
