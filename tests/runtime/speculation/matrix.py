"""Every drafter with every way of asking, over engines of several formats. A drafter is one line of DRAFTERS."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc import Engine, SamplingParams, load
from llmc.compiler import build
from llmc.runtime.grammar.grammar import Grammar, GrammarKind
from llmc.runtime.requests.completion import Completion
from llmc.training.train_medusa import train_medusa
from tests.runtime.speculation.fitted_mtp import fit_mtp

MODELS = Path(__file__).parents[3] / "examples/models"
PROMPTS = ("KING RICHARD:", "The", "My lord, my lord, my lord, my lord, I", "First Citizen:\nBefore we proceed")
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 4},
    "penalties": {"temperature": 0.7, "seed": 5, "presence_penalty": 0.6, "repetition_penalty": 1.2},
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 0.8},
    "regex": {"temperature": 0.9, "seed": 6, "grammar": Grammar(GrammarKind.REGEX, "[a-z ]{3,60}\\.")},
    "json": {"temperature": 0.9, "seed": 12, "grammar": Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)},
    "logprobs": {"temperature": 0.6, "seed": 7, "logprobs": 3},
    "greedy logprobs": {"temperature": 0.0, "logprobs": 3},
    "stop": {"temperature": 0.0, "stop": ["\n", "lord"]},
    "stop ids": {"temperature": 0.8, "seed": 8, "stop_token_ids": [13, 199, 305]},
    "choices": {"temperature": 0.9, "seed": 9, "n": 2},
    "typical": {"temperature": 0.9, "seed": 10, "typical_p": 0.6},
    "min_p and bias": {"temperature": 0.9, "seed": 11, "min_p": 0.05, "logit_bias": {40: 3.0}, "min_tokens": 5},
}


def asked(prompts: Sequence[str] = PROMPTS) -> tuple[list[str], list[SamplingParams]]:
    """Every option with every prompt: prompts, and how to continue them."""
    both = [(p, SamplingParams(max_tokens=24 + i, **o)) for i, p in enumerate(prompts) for o in OPTIONS.values()]
    texts, params = zip(*both, strict=True)
    return list(texts), list(params)


def told(completion: Completion) -> object:
    """All that a user sees; floats as they are, to the last bit."""
    return [(c.text, c.token_ids, c.finish_reason, c.stop_reason, c.logprobs) for c in completion.choices]


def one_by_one(engine: Engine, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[object]:
    """What each is told alone."""
    return [told(engine.generate(*question)[0]) for question in zip(prompts, params, strict=True)]


@dataclass
class Engines:
    """Builds the shipped models in formats, each once, and remembers what they say without speculation."""

    directory: Path
    _answers: dict[tuple[Path, int], list[object]] = field(default_factory=dict)

    def built(self, model: str, form: str, draft: str | None = None) -> Path:
        """The engine of a model in one of FORMATS. draft: the checkpoint of what drafts inside it."""
        path = self.directory / f"{model}-{draft}-{form}.llmc"
        if not path.exists():
            speculative = None if draft is None else MODELS / draft
            build(MODELS / model, path, **_LIMITS, speculative=speculative, **FORMATS[form])
        return path

    def with_heads(self, model: str, form: str) -> Path:
        """The same with Medusa heads that were trained on a little of what it writes."""
        path = self.directory / f"{model}-{form}-medusa.llmc"
        heads = self.directory / f"{model}-heads" / "heads.safetensors"
        if not heads.exists():
            text = MODELS.parent / "data/calibration.txt"
            train_medusa(self.built(model, QUICK), text, heads, tokens=2000, epochs=4, threads=1)
        if not path.exists():
            build(MODELS / model, path, **_LIMITS, speculative=heads, **FORMATS[form])
        return path

    def with_mtp(self, model: str, form: str, layers: int = 1) -> Path:
        """The same with layers of its own that draft."""
        path = self.directory / f"{model}-{form}-mtp-{layers}.llmc"
        checkpoint = self.directory / f"{model}-mtp-{layers}"
        if not checkpoint.exists():
            fit_mtp(MODELS / model, MODELS.parent / "data/calibration.txt", checkpoint, layers)
        if not path.exists():
            build(checkpoint, path, **_LIMITS, speculative="mtp", **FORMATS[form])
        return path

    def answers(self, path: Path, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[object]:
        """Without drafts, one by one."""
        key = path, len(prompts)
        if key not in self._answers:
            with load(path) as engine:
                self._answers[key] = one_by_one(engine, prompts, params)
        return self._answers[key]


FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "w4a8": {"dtype": "bfloat16", "quantize": "w4a8"},
    "fp32, int8 cache": {"dtype": "float32", "kv_cache": "int8"},
    "bf16, int8 cache": {"dtype": "bfloat16", "kv_cache": "int8"},
    "bf16, newest rows exact": {"dtype": "bfloat16", "kv_cache": "int4:rotated:recent=16"},
    "w4a8, int8 cache": {"dtype": "bfloat16", "quantize": "w4a8", "kv_cache": "int8"},
}
# With room for all neighbours, and for the trees of many of them, in a step.
_LIMITS: dict[str, Any] = {"max_model_len": 256, "max_sequences": 64, "max_logit_rows": 384}
# The one that every `make test` runs.
QUICK = "bf16"

# What is loaded, in that format, and with which speculation.
Opening = Callable[[Engines, str], tuple[Path, Mapping[str, Any]]]
DRAFTERS: dict[str, Opening] = {
    "ngram": lambda engines, form: (
        engines.built("bard-6m", form),
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    ),
    "suffix": lambda engines, form: (
        engines.built("bard-6m", form),
        {"method": "suffix", "num_speculative_tokens": 4},
    ),
    "lookahead": lambda engines, form: (engines.built("bard-6m", form), {"method": "lookahead"}),
    "medusa": lambda engines, form: (
        engines.with_heads("bard-6m", form),
        {"method": "medusa", "num_speculative_tokens": 6},
    ),
    "draft_model": lambda engines, form: (
        engines.built("bard-6m", form),
        {
            "method": "draft_model",
            "model": str(engines.built("bard-draft", form)),
            "num_speculative_tokens": 4,
        },
    ),
    "eagle3": lambda engines, form: (
        engines.built("bard-6m", form, draft="bard-eagle3"),
        {"method": "eagle3", "num_speculative_tokens": 6, "tree_width": 3},
    ),
    "eagle3 in chains": lambda engines, form: (
        engines.built("bard-6m", form, draft="bard-eagle3"),
        {"method": "eagle3", "num_speculative_tokens": 4, "tree_width": 1},
    ),
    "mtp": lambda engines, form: (
        engines.with_mtp("bard-6m", form),
        {"method": "mtp", "num_speculative_tokens": 6},
    ),
    "mtp of two layers": lambda engines, form: (
        engines.with_mtp("bard-6m", form, layers=2),
        {"method": "mtp", "num_speculative_tokens": 4},
    ),
}
