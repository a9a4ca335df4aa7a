"""Hugging Face transformers on a GPU: eager, or compiled with CUDA graphs for each shape by itself.

Decode has a static cache, filled with random keys and values, which costs both the same and reads no prompt; prefill
has the cache that transformers makes for a prompt if it is run eagerly, and compiled it keeps none.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec

import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from benchmarks.gpu.measurement import Measurement, report
from benchmarks.gpu.workloads import (
    DECODE_STEPS,
    DECODES,
    PREFILLS,
    ROUNDS,
    Decode,
    Prefill,
    decode_bytes,
    prefill_flops,
)

_P = ParamSpec("_P")
WARM_UP_STEPS = 4
WARM_UP_PROMPTS = 3


class HfModel:
    """The model on `device`; tokens are chosen by argmax there and brought back each step, as llmc's are.

    mode: of torch.compile; None runs eagerly. drawn: its weights are drawn on the device, and only its configuration is
    read.
    """

    def __init__(self, path: str, mode: str | None, device: str = "cuda", drawn: bool = False) -> None:
        self._device = device
        wanted: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
        if drawn:
            with torch.device(device):
                auto: Any = AutoModelForCausalLM
                model: Any = auto.from_config(AutoConfig.from_pretrained(path), **wanted)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, **wanted)
        self._model, self._mode = model.to(device).train(False), mode

    def measure(self, work: Decode | Prefill) -> tuple[float, ...]:
        """Seconds of the rounds, each a step on average or a prompt."""
        return self.prepared(work)()

    def prepared(self, work: Decode | Prefill) -> Callable[[], tuple[float, ...]]:
        """Compile what the workload needs and warm it up; the function measures it."""
        return self._prefill(work) if isinstance(work, Prefill) else self._decode(work)

    @torch.inference_mode()
    def _prefill(self, work: Prefill) -> Callable[[], tuple[float, ...]]:
        ids, first = self._tokens(1, work.tokens), self._for_one_shape(self._first)

        @torch.inference_mode()
        def rounds(count: int) -> tuple[float, ...]:
            seconds = []
            for _ in range(count):
                start = time.perf_counter()
                first(ids).tolist()
                seconds.append(time.perf_counter() - start)
            return tuple(seconds)

        # The compiled function's first call compiles, its second records a graph, its third runs it.
        rounds(WARM_UP_PROMPTS)
        return partial(rounds, ROUNDS)

    @torch.inference_mode()
    def _decode(self, work: Decode) -> Callable[[], tuple[float, ...]]:
        cache = self._filled_cache(work, work.context + WARM_UP_STEPS + ROUNDS * DECODE_STEPS + 1)
        ids = self._tokens(work.batch, 1)
        positions = torch.full((work.batch, 1), work.context, device=self._device)
        decode = self._for_one_shape(self._next)

        @torch.inference_mode()
        def steps(count: int) -> float:
            nonlocal ids
            start = time.perf_counter()
            for _ in range(count):
                ids = decode(ids, positions, cache).clone()
                positions.add_(1)
                ids.tolist()
            return (time.perf_counter() - start) / count

        steps(WARM_UP_STEPS)
        return lambda: tuple(steps(DECODE_STEPS) for _ in range(ROUNDS))

    def _for_one_shape(self, plain: Callable[_P, torch.Tensor]) -> Callable[_P, torch.Tensor]:
        """The function, compiled if this is that contestant: with sizes that are known."""
        if self._mode is None:
            return plain
        made: Callable[_P, torch.Tensor] = torch.compile(plain, mode=self._mode, fullgraph=True, dynamic=False)
        return made

    def _first(self, ids: torch.Tensor) -> torch.Tensor:
        output = self._model(ids, use_cache=self._mode is None, logits_to_keep=1)
        result: torch.Tensor = output.logits.argmax(-1)
        return result

    def _next(self, ids: torch.Tensor, positions: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        output = self._model(ids, past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1)
        result: torch.Tensor = output.logits[:, -1:].argmax(-1)
        return result

    def _filled_cache(self, work: Decode, length: int) -> StaticCache:
        config = self._model.config
        cache = StaticCache(config=config, max_cache_len=length)
        cache.early_initialization(
            work.batch, config.num_key_value_heads, config.head_dim, torch.bfloat16, torch.device(self._device)
        )
        layers: list[Any] = cache.layers
        for layer in layers:
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(work.context)
        return cache

    def _tokens(self, batch: int, length: int) -> torch.Tensor:
        return torch.randint(0, self._model.config.vocab_size, (batch, length), device=self._device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text())
    group = arguments.model.name
    name = "HF torch.compile" if arguments.compiled else "HF eager"
    contestant = HfModel(str(arguments.model), "max-autotune" if arguments.compiled else None)
    for decode in DECODES:
        torch._dynamo.reset()
        seconds = contestant.measure(decode)
        of_cache = f"{name}, static cache"
        report(Measurement(group, decode.name, of_cache, seconds, bytes=decode_bytes(config, decode)))
        torch.cuda.empty_cache()
    for prefill in PREFILLS:
        torch._dynamo.reset()
        seconds = contestant.measure(prefill)
        report(Measurement(group, prefill.name, name, seconds, flops=prefill_flops(config, prefill)))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
