"""The Hugging Face peer of the GPU suite, eager on the CPU with a tiny model: its cache is filled and decoded from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.gpu import hf_model
from benchmarks.gpu.workloads import DECODE_STEPS, ROUNDS, Decode, Prefill


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("tiny")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 60}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("drawn", [False, True])
def test_decode_and_prefill_run(tiny: str, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    model = hf_model.HfModel(tiny, None, "cpu", drawn)
    step: Callable[..., torch.Tensor] = model._next

    def counted(ids: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        lengths.append(int(positions[0, 0]))
        return step(ids, positions, cache)

    monkeypatch.setattr(model, "_next", counted)
    measured = model.prepared(Decode(2, 20))
    assert lengths == list(range(20, 20 + hf_model.WARM_UP_STEPS))
    assert len(measured()) == ROUNDS
    assert lengths == list(range(20, 20 + hf_model.WARM_UP_STEPS + ROUNDS * DECODE_STEPS))
    assert len(model.measure(Prefill(9))) == ROUNDS


@pytest.mark.slow
def test_each_shape_is_compiled_by_itself(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, once, and with every size known: a second batch would else get the first one's graph made general."""
    seen: list[tuple[bool, list[Any]]] = []

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        sizes = [size for x in examples if isinstance(x, torch.Tensor) for size in x.shape]
        seen.append((all(isinstance(size, int) for size in sizes), sizes))
        return module.forward

    compile = torch.compile

    def eagerly(plain: Any, *, mode: str, fullgraph: bool, dynamic: bool) -> Any:
        assert (mode, fullgraph, dynamic) == ("max-autotune", True, False)
        return compile(plain, backend=backend, fullgraph=True, dynamic=False)

    monkeypatch.setattr(torch, "compile", eagerly)
    monkeypatch.setattr(hf_model, "ROUNDS", 1)
    monkeypatch.setattr(hf_model, "DECODE_STEPS", 2)
    model = hf_model.HfModel(tiny, "max-autotune", "cpu")
    for batch in (1, 3):
        assert len(model.measure(Decode(batch, 20))) == 1
    assert len(model.measure(Prefill(9))) == 1
    assert len(seen) == 3
    assert all(is_static for is_static, _ in seen)
