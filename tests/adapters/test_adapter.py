"""Reading PEFT directories: what is understood, and that everything else is an AdapterError that says why."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.adapters.adapter import read_adapter
from llmc.adapters.module_name import tail
from llmc.errors import AdapterError
from tests.adapters.directories import llama_adapter, written_adapter

PAIR = {"model.q.lora_A.weight": torch.ones(4, 6), "model.q.lora_B.weight": torch.ones(5, 4)}


def test_matrices_are_scaled_by_alpha_over_rank(tmp_path: Path) -> None:
    adapter = read_adapter(written_adapter(tmp_path, PAIR, lora_alpha=6))
    a, b = adapter.matrices(adapter.modules["q"])
    assert (a.shape, b.shape, float(a[0, 0]), float(b[0, 0])) == ((4, 6), (5, 4), 1.0, 1.5)


def test_rank_stabilized_scale(tmp_path: Path) -> None:
    adapter = read_adapter(written_adapter(tmp_path, PAIR, lora_alpha=6, use_rslora=True))
    assert adapter.modules["q"].scale == 3.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_matrices_of_any_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: (tensor * 0.75).to(dtype) for name, tensor in PAIR.items()}
    adapter = read_adapter(written_adapter(tmp_path, tensors))
    assert float(adapter.matrices(adapter.modules["q"])[0][3, 5]) == 0.75


def test_digest_is_of_the_content(tmp_path: Path) -> None:
    first, same, other = (read_adapter(llama_adapter(tmp_path / str(i), seed=s)) for i, s in enumerate((1, 1, 2)))
    assert first.digest == same.digest != other.digest


def test_tails_of_names() -> None:
    assert tail("model.language_model.layers.3.self_attn.q_proj") == tail("layers.3.self_attn.q_proj")
    assert tail("transformer.h.0.attn.c_attn") == "h.0.attn.c_attn"
    assert tail("model.embed_tokens") == tail("embed_tokens") == "embed_tokens"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "is DoRA"),
    "bias": ({"bias": "all"}, "has biases"),
    "parameters": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "adapts parameters"),
    "replication": ({"layer_replication": [[0, 4], [2, 5]]}, "repeats layers"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
    "kind": ({"peft_type": "IA3"}, "of kind 'IA3'"),
    "rank": ({"r": -3}, "a rank is -3"),
    "other rank": ({"r": 8}, "has rank 4, but"),
    "alpha": ({"lora_alpha": "a lot"}, "lora_alpha is 'a lot'"),
    "endless pattern": ({"alpha_pattern": {"(a+)+$": 3}}, "repeats too much"),
    "no pattern": ({"alpha_pattern": {"(q": 3}}, "is not a regular expression"),
    "patterns": ({"rank_pattern": [3]}, "not an object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_kinds_that_are_not_computed_are_refused(case: str, tmp_path: Path) -> None:
    config, problem = REFUSED[case]
    with pytest.raises(AdapterError) as raised:
        read_adapter(written_adapter(tmp_path, PAIR, **config))
    assert problem in str(raised.value)


def test_odd_tensors_are_refused(tmp_path: Path) -> None:
    for number, tensors in enumerate(
        (
            {"model.q.lora_A.weight": torch.ones(4, 6)},
            PAIR | {"model.q.lora_magnitude_vector": torch.ones(5)},
            PAIR | {"model.q.lora_B.weight": torch.ones(5, 3)},
            PAIR | {"other.q.lora_A.weight": torch.ones(4, 6), "other.q.lora_B.weight": torch.ones(5, 4)},
            {"model.q.lora_A.weight": torch.ones(4, 6, 1), "model.q.lora_B.weight": torch.ones(5, 4, 1)},
            {},
        )
    ):
        with pytest.raises(AdapterError):
            read_adapter(written_adapter(tmp_path / str(number), tensors))


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="not a directory"):
        read_adapter(tmp_path / "nowhere")
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        read_adapter(tmp_path)
    written_adapter(tmp_path, PAIR)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match="pickle"):
        read_adapter(tmp_path)


def test_damaged_files_are_read_rightly_or_refused(tmp_path: Path) -> None:
    """A byte or a run of bytes changed, or the end cut off: an AdapterError or matrices, never anything else."""
    written_adapter(tmp_path, PAIR, rank_pattern={"q": 4}, alpha_pattern={".*q": 2})
    whole = {name: (tmp_path / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    random_ = random.Random(20)
    refused = 0
    for _ in range(400):
        name = random_.choice(sorted(whole))
        data = bytearray(whole[name])
        at = random_.randrange(len(data))
        kind = random_.randrange(3)
        if kind == 0:
            data[at] = random_.randrange(256)
        elif kind == 1:
            del data[at:]
        else:
            data[at : at + 4] = b"9999"
        (tmp_path / name).write_bytes(data)
        try:
            adapter = read_adapter(tmp_path)
            for module in adapter.modules.values():
                adapter.matrices(module)
        except AdapterError:
            refused += 1
        (tmp_path / name).write_bytes(whole[name])
    assert 100 < refused < 400


def test_deep_json_is_refused(tmp_path: Path) -> None:
    written_adapter(tmp_path, PAIR)
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(AdapterError):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(AdapterError, match="not an object"):
        read_adapter(tmp_path)
