"""The Hugging Face peer of the GPU suite, eager on the CPU with a tiny model: its cache is filled and decoded from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import hf_model
from benchmarks.gpu.workloads import DECODE_STEPS, ROUNDS, Decode, Prefill


def test_decode_and_prefill_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 60}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    lengths: list[int] = []
    model = hf_model.HfModel(str(tmp_path), compiled=False, device="cpu")
    step = model._step

    def counted(ids: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        lengths.append(int(positions[0, 0]))
        return step(ids, positions, cache)

    monkeypatch.setattr(model, "_step", counted)
    assert len(model.decode(Decode(2, 20))) == ROUNDS
    assert lengths == list(range(20, 20 + hf_model.WARM_UP_STEPS + ROUNDS * DECODE_STEPS))
    assert len(model.prefill(Prefill(9))) == ROUNDS
