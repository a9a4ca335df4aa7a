"""Train a small mixture of experts, or a small hybrid of states and attention, on what the shipped model writes.

    python examples/train_small_models.py mixture my-mixture       # some ten minutes on one core
    python examples/train_small_models.py hybrid my-hybrid         # the same
    python examples/train_small_models.py mixture --written 8192 --steps 4    # a look

The shipped model's engine writes the text, some thousand tokens a second, and the model itself says of each token what
else it could have been: that is what is learned (Hinton et al. 2015), since it says more than a token does. The new
model begins with its embeddings. Both are classes of transformers as they are.
"""

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import llmc

EXAMPLES = Path(__file__).parent
TEACHER = EXAMPLES / "models" / "bard-6m"
LENGTH, BATCH, RATE = 256, 8, 3e-3

# Each token goes to 4 of 16 experts in each of three layers.
MIXTURE: dict[str, Any] = {
    "model_type": "olmoe",
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.01,
}
# Three layers of a gated delta net, and one of attention.
HYBRID: dict[str, Any] = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "head_dim": 64,
    "intermediate_size": 512,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "mlp_only_layers": [0, 1, 2, 3],
    "num_experts": 0,
}
KINDS = {"mixture": MIXTURE, "hybrid": HYBRID}


def untrained(kind: str, teacher: PreTrainedModel) -> PreTrainedModel:
    """As wide and as many heads as the model that it learns from, and with its embeddings."""
    same = (
        *("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    )
    values = {name: getattr(teacher.config, name) for name in same}
    of_both = {"max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values, **of_both, **KINDS[kind]))
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(teacher.get_input_embeddings().weight)
    return model


def written(tokens: int, vocabulary: int) -> Tensor:
    """Windows that the shipped model writes as it means them, each after a token by chance. [windows, LENGTH]"""
    begin = torch.randint(3, vocabulary, (tokens // LENGTH, 1))
    drawn = llmc.SamplingParams(max_tokens=LENGTH - 1, temperature=1.0, ignore_eos=True, seed=0)
    with llmc.compile(TEACHER, max_model_len=LENGTH, max_sequences=64) as engine:
        answers = engine.generate(begin.tolist(), drawn)
    return torch.cat([begin, torch.tensor([answer.choices[0].token_ids for answer in answers])], 1)


def batches(windows: Tensor, steps: int) -> Iterator[Tensor]:
    """All windows in an order by chance, again and again."""
    order = torch.cat([torch.randperm(len(windows)) for _ in range(math.ceil(steps * BATCH / len(windows)))])
    return (windows[order[step * BATCH : (step + 1) * BATCH]] for step in range(steps))


def train(student: PreTrainedModel, teacher: PreTrainedModel, windows: Tensor, steps: int) -> None:
    """Towards the probabilities that the teacher gives."""
    matrices = [value for value in student.parameters() if value.ndim > 1]
    vectors = [value for value in student.parameters() if value.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, RATE, betas=(0.9, 0.95))
    begun = time.monotonic()
    for step, tokens in enumerate(batches(windows, steps)):
        warm, cooled = min(1.0, (step + 1) / 50), 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = RATE * warm * (0.98 * cooled + 0.02)
        with torch.no_grad():
            wanted = log_softmax(teacher(tokens).logits.float(), -1)
        with torch.autocast("cpu", torch.bfloat16):
            out = student(tokens)
        loss = kl_div(log_softmax(out.logits.float(), -1), wanted, reduction="sum", log_target=True) / tokens.numel()
        balance = out.aux_loss * student.config.router_aux_loss_coef if "aux_loss" in out else 0.0
        optimizer.zero_grad()
        (loss + balance).backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 19:
            seconds = time.monotonic() - begun
            print(f"step {step + 1} of {steps}: {loss.item():.3f} from the teacher, {seconds:.0f} s", flush=True)


@torch.no_grad()
def heldout_loss(model: PreTrainedModel) -> float:
    """Of a token of text that is held out, in nats."""
    text = (EXAMPLES / "data" / "heldout.txt").read_text(encoding="utf-8")
    ids = torch.tensor(AutoTokenizer.from_pretrained(TEACHER)(text)["input_ids"])
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH).split(BATCH)
    losses = [
        cross_entropy(model(each).logits[:, :-1].flatten(0, 1), each[:, 1:].flatten()) * len(each) for each in windows
    ]
    return float(sum(losses) / sum(len(each) for each in windows))


def save(model: PreTrainedModel, training: dict[str, object], output: Path) -> None:
    """A directory as the hub has them, in bf16, with the teacher's tokenizer."""
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(output)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TEACHER / name, output / name)
    (output / "TRAINING.json").write_text(json.dumps(training, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=tuple(KINDS))
    parser.add_argument("output", type=Path, nargs="?", help="a directory; default: a temporary one")
    parser.add_argument("--written", type=int, default=2**18, help="tokens that the shipped model writes")
    parser.add_argument("--steps", type=int, default=450, help=f"of {BATCH} windows of {LENGTH} tokens")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    teacher = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.bfloat16).eval()
    student = untrained(arguments.kind, teacher)
    windows = written(arguments.written, teacher.config.vocab_size)
    train(student.train(), teacher, windows, arguments.steps)
    found = heldout_loss(student.eval())
    print(f"perplexity of held-out text: {math.exp(found):.1f}")
    training = {
        "steps": arguments.steps,
        "tokens_written": windows.numel(),
        "tokens_seen": arguments.steps * BATCH * LENGTH,
        "heldout_loss": found,
        "heldout_ppl": math.exp(found),
    }
    with tempfile.TemporaryDirectory() as folder:
        output = arguments.output or Path(folder) / arguments.kind
        save(student, training, output)
        with llmc.compile(output, output=Path(folder) / "engine.llmc") as engine:
            answer = engine.generate("My lord, ", max_tokens=40, temperature=0.7, seed=0)[0]
            print("My lord, " + answer.choices[0].text)


if __name__ == "__main__":
    main()
