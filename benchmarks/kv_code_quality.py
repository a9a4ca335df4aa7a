"""What forms of a KV cache lose on a real model, those that llmc has and others, simulated in transformers.

    python -m benchmarks.kv_code_quality --model smollm2 --windows 16 --json kv-code-quality-smollm2.json
    python -m benchmarks.kv_code_quality --errors --model gemma3 --windows 1

The model is in fp32, on the windows of `benchmarks.real_models quality`; attention reads keys and values as each
candidate stores them (benchmarks/kv_code_roundings.py). Perplexity and KL are compared with the model's own, whose
cache is not rounded. Simulated figures of formats that llmc has show how far engines agree. A --json file that was
begun is gone on with. --errors compares what each layer's attention adds to the residual instead: the squared error,
relative to the square of what it adds, of all forms in one run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from benchmarks.kv_code_roundings import CANDIDATES, Candidate, exact
from benchmarks.llama_1b import machine
from benchmarks.real_model_files import MODELS, fetched, numbers_of
from benchmarks.real_model_quality import PLAIN, Record, Row
from benchmarks.special_prefix import special_prefix
from benchmarks.table_record import record_table
from llmc.debug.compare import windows

DATA = Path(__file__).parent.parent / "examples" / "data"
UNROUNDED = Candidate(PLAIN, exact, exact, 256, 256)
# Of the calibration text, for the means of keys. The first rows' keys are unlike all others.
_CALIBRATION_WINDOWS, _UNLIKE = 4, 4
# Candidates that share a run of the unrounded model, after which their rows are recorded.
_AT_ONCE = 6


@dataclass
class Simulation:
    """A model whose attention reads keys and values through one candidate at a time.

    Args:
        model: of transformers, with the attention that `attend` registers.
        candidate: the form of the cache.
        centers: by layer, what is subtracted from keys, [heads, 1, channels].
        means: by layer, the keys' means of each run; None while nothing is calibrated.
        compared: by candidate, the errors of each layer; None unless they are measured.
    """

    model: Any
    candidate: Candidate = UNROUNDED
    centers: dict[int, Tensor] = field(default_factory=dict)
    means: dict[int, list[Tensor]] | None = None
    compared: dict[str, list[float]] | None = None

    def log_probabilities(self, tokens: Sequence[int], candidate: Candidate) -> Tensor:
        """Of the next token at each position, [tokens, vocabulary]."""
        self.candidate = candidate
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([tokens])).logits[0]
            return logits.log_softmax(-1)

    def calibrate(self, pieces: Sequence[Sequence[int]]) -> None:
        """Measure the keys of every layer on a text."""
        self.means = {}
        for piece in pieces:
            self.log_probabilities(piece, UNROUNDED)
        self.centers = {layer: torch.stack(found).mean(0) for layer, found in self.means.items()}
        self.means = None

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """Causal attention over rounded keys and values, as transformers calls it: [1, heads, tokens, channels]."""
        layer = module.layer_idx
        if self.means is not None:
            self.means.setdefault(layer, []).append(key[0, :, _UNLIKE:].mean(1, keepdim=True))
        if options.get("sliding_window") is not None and options["sliding_window"] < key.shape[2]:
            raise ValueError(f"a window of {options['sliding_window']} is shorter than {key.shape[2]} tokens")
        given = query[0], key[0], value[0], self.centers.get(layer), options["scaling"]
        out = attention(self.candidate, *given)
        for name, errors in (self.compared or {}).items():
            errors.append(_error(attention(CANDIDATES[name], *given), out, module.o_proj.weight))
        return out.transpose(0, 1)[None].contiguous(), None

    def attention_errors(self, candidates: Sequence[Candidate], pieces: Sequence[Sequence[int]]) -> dict[str, float]:
        """By candidate, the mean over layers of the relative squared error of what attention adds to the residual.

        Each layer is given the queries, keys and values of the unrounded model, so one run measures all candidates.
        """
        self.compared = {each.name: [] for each in candidates}
        for piece in pieces:
            self.log_probabilities(piece, UNROUNDED)
        found, self.compared = self.compared, None
        return {name: sum(errors) / len(errors) for name, errors in found.items()}


def _error(found: Tensor, expected: Tensor, projection: Tensor) -> float:
    """Of [heads, tokens, channels], behind the output projection."""
    error, whole = ((x.transpose(0, 1).flatten(1) @ projection.T).square().sum() for x in (found - expected, expected))
    return float(error / whole)


def attention(candidate: Candidate, q: Tensor, k: Tensor, v: Tensor, center: Tensor | None, scale: float) -> Tensor:
    """Causal attention of all tokens over a cache in a candidate's form.

    Args:
        candidate: the form.
        q: [heads, tokens, channels].
        k: [KV heads, tokens, channels].
        v: [KV heads, tokens, channels].
        center: what a centered candidate subtracts from keys, [KV heads, 1, channels].
        scale: of scores.

    Returns:
        [heads, tokens, channels].
    """
    if candidate.centered:
        assert center is not None, "centers are measured before"
        k = k - center
    group, tokens = q.shape[0] // k.shape[0], torch.arange(k.shape[1])
    q = q.unflatten(0, (-1, group))
    query, key = tokens[:, None], tokens[None, :]
    stays = (key < candidate.first) | (query - key < candidate.recent)
    if candidate.tile > 1:
        stays |= key >= (query + 1) // candidate.tile * candidate.tile
    coded_keys, coded_values = candidate.keys(k)[:, None], candidate.values(v)[:, None]
    scores = q @ coded_keys.transpose(-1, -2)
    if bool(stays.any()):
        scores = torch.where(stays, q @ k[:, None].transpose(-1, -2), scores)
    shares = (scores * scale).masked_fill(key > query, -torch.inf).softmax(-1)
    out = (shares * ~stays) @ coded_values + (shares * stays) @ v[:, None] if stays.any() else shares @ coded_values
    return out.flatten(0, 1)


def measured(simulation: Simulation, candidates: Sequence[Candidate], pieces: Sequence[list[int]]) -> list[Row]:
    """One row for each candidate; the unrounded model runs each piece once for all of them."""
    totals = {each.name: torch.zeros(3, dtype=torch.float64) for each in candidates}
    for piece in pieces:
        expected = simulation.log_probabilities(piece, UNROUNDED)
        for each in candidates:
            given = expected if each is UNROUNDED else simulation.log_probabilities(piece, each)
            lost = -given[:-1].gather(1, torch.tensor(piece[1:])[:, None]).double().sum()
            divergence = (expected.exp() * (expected - given)).sum(-1).double().sum()
            totals[each.name] += torch.stack((lost, divergence, (expected.argmax(-1) == given.argmax(-1)).sum()))
    count, today = sum(map(len, pieces)), date.today().isoformat()
    rows = []
    for each in candidates:
        lost, divergence, same = totals[each.name].tolist()
        perplexity = math.exp(lost / (count - len(pieces)))
        rows.append(Row(each.name, _bits(each), perplexity, divergence / count, same / count, 0.0, count, today))
    return rows


def table(record: Record) -> list[str]:
    """The record as Markdown, with each perplexity relative to the unrounded cache's."""
    (plain,) = (row for row in record.rows if row.form == PLAIN)
    lines = [
        "| KV cache | bits per channel | perplexity | relative | KL | same first choice |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in record.rows:
        figures = f"{row.bits:.2f} | {row.perplexity:.3f} | {row.perplexity / plain.perplexity:.4f}"
        lines.append(f"| {row.form} | {figures} | {row.divergence:.5f} | {row.same:.1%} |")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("smollm2", "gemma3"), default="smollm2")
    parser.add_argument("--forms", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES), metavar="FORM")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, help="windows that are judged; default: the whole text")
    parser.add_argument("--cache", type=Path, default=Path("examples/out/real-models"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--errors", action="store_true", help="of attention's output instead of perplexities: one run for all forms"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.cache.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(given.threads)
    of_text = {"text": "heldout.txt", "length": given.length, "windows": given.windows}
    if given.errors:
        lines = _errors(given)
        print("\n".join(lines))
        if given.json is not None:
            record_table(given.json, {"machine": machine(given.threads), "model": given.model}, lines)
        return
    record = Record.at(given.json, {"machine": machine(given.threads), "model": given.model, **of_text})
    missing = [CANDIDATES[name] for name in given.forms if not record.has(name)]
    if missing:
        numbers = numbers_of(fetched(MODELS[given.model], given.cache), given.cache)
        simulation, pieces = _prepared(numbers, missing, given)
        missing = missing if record.has(PLAIN) else [UNROUNDED, *missing]
        for begin in range(0, len(missing), _AT_ONCE):
            for row in measured(simulation, missing[begin : begin + _AT_ONCE], pieces):
                record.add(row)
    print("\n".join(table(record)))


def _errors(given: argparse.Namespace) -> list[str]:
    numbers = numbers_of(fetched(MODELS[given.model], given.cache), given.cache)
    candidates = [CANDIDATES[name] for name in given.forms]
    simulation, pieces = _prepared(numbers, candidates, given)
    found = simulation.attention_errors(candidates, pieces)
    lines = ["| KV cache | bits per channel | error of attention |", "|---|--:|--:|"]
    return lines + [f"| {each.name} | {_bits(each):.2f} | {100 * found[each.name]:.3f}% |" for each in candidates]


def _bits(candidate: Candidate) -> float:
    return 8 * (candidate.key_bytes + candidate.value_bytes) / 128


def _prepared(
    numbers: Path, candidates: Sequence[Candidate], given: argparse.Namespace
) -> tuple[Simulation, list[list[int]]]:
    """The model, with means of its keys where a candidate needs them, and the windows that are judged."""
    model = AutoModelForCausalLM.from_pretrained(numbers, dtype=torch.float32, attn_implementation="eager")
    model.train(False)
    tokenizer = AutoTokenizer.from_pretrained(numbers)
    simulation = Simulation(model)
    AttentionInterface.register("coded", simulation.attend)
    model.set_attn_implementation("coded")
    calibration, text = (
        tokenizer((DATA / name).read_text(), add_special_tokens=False).input_ids
        for name in ("calibration.txt", "heldout.txt")
    )
    prefix = special_prefix(tokenizer.backend_tokenizer)
    if any(each.centered for each in candidates):
        simulation.calibrate(windows(calibration, given.length, _CALIBRATION_WINDOWS, prefix))
    return simulation, list(windows(text, given.length, given.windows, prefix))


if __name__ == "__main__":
    main()
