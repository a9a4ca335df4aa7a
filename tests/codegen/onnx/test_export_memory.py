"""An export is written one weight at a time: it takes less memory than half of what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

_GIB = 1 << 30
# What is said of a process by getrusage may be of the one that has started it.
_EXPORT = """
import sys, llmc
llmc.export(sys.argv[1], sys.argv[2], stage="canonical")
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def checkpoint_of_zeros(directory: Path) -> Path:
    """A Llama of 0.9 billion parameters in bf16, in a file that takes no room on the disk."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=32768,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in LlamaForCausalLM(config).state_dict().items()}
    directory.mkdir()
    config.save_pretrained(directory)
    header, end = dict[str, object](), 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return directory


@pytest.mark.slow
def test_three_gibibytes_take_less_than_two_of_memory(tmp_path: Path) -> None:
    checkpoint = checkpoint_of_zeros(tmp_path / "model")
    command = [sys.executable, "-c", _EXPORT, str(checkpoint), str(tmp_path / "out")]
    most = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) << 10
    assert (tmp_path / "out" / "weights.safetensors").stat().st_size > 3 * _GIB
    assert (tmp_path / "out" / "model.onnx").stat().st_size < 1 << 20
    assert most < 2 * _GIB, f"{most / _GIB:.2f} GiB"
