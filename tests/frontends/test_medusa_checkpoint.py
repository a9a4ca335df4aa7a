"""Medusa heads are read in each layout that they are published in; what is none is refused with what was seen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmc.errors import CheckpointError
from llmc.frontends.drafts.medusa import holds_medusa, read_medusa
from llmc.graph.draft_records import MedusaBlock, MedusaHead
from tests.medusa_heads import medusa_1, vllm


def test_medusa_1(tmp_path: Path) -> None:
    file = tmp_path / "medusa_lm_head.safetensors"
    tensors = medusa_1(file, 8, heads=3, layers=2, outputs=torch.ones(20, 8))
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
    checkpoint = read_medusa(tmp_path)
    assert len(checkpoint.heads) == 3, "tensors are counted, whatever config.json says"
    assert checkpoint.heads[1] == MedusaHead(
        (MedusaBlock("1.0.linear.weight", "1.0.linear.bias"), MedusaBlock("1.1.linear.weight", "1.1.linear.bias")),
        "1.2.weight",
    )
    assert torch.equal(checkpoint.source.load("1.0.linear.bias"), tensors["1.0.linear.bias"])
    assert checkpoint.source.names() == tuple(sorted(tensors)) and holds_medusa(tmp_path)


def test_medusa_2_among_the_tensors_of_its_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = medusa_1(file, 8, prefix="medusa_head.")
    save_file(
        {**tensors, "model.layers.0.mlp.up_proj.weight": torch.zeros(3, 3), "lm_head.weight": torch.ones(2)}, file
    )
    checkpoint = read_medusa(file)
    assert [head.output for head in checkpoint.heads] == [None, None]
    assert set(checkpoint.source.names()) == set(tensors)


def test_vllms_names_are_read(tmp_path: Path) -> None:
    file = tmp_path / "heads.safetensors"
    vllm(file, 8, outputs=[torch.ones(6, 8), torch.zeros(6, 8)], token_map=torch.arange(6))
    checkpoint = read_medusa(file)
    assert checkpoint.heads[1] == MedusaHead((MedusaBlock("blocks.1.layers.0.weight", None),), "lm_heads.1.weight")
    assert checkpoint.token_map == "token_map"


def test_vllm_with_one_output_matrix_for_all_heads(tmp_path: Path) -> None:
    file = tmp_path / "heads.safetensors"
    save_file({**vllm(file, 8), "lm_head.weight": torch.ones(20, 8)}, file)
    assert [head.output for head in read_medusa(file).heads] == ["lm_head.weight"] * 2


def test_shared_resblock(tmp_path: Path) -> None:
    """The reference implementation repeats one block in all layers of a head, and safetensors keeps one copy of it."""
    file = tmp_path / "heads.safetensors"
    tensors = medusa_1(file, 8, heads=1, layers=3, outputs=torch.ones(20, 8))
    save_file({name: value for name, value in tensors.items() if not name.startswith(("0.1.", "0.2."))}, file)
    assert read_medusa(file).heads[0].blocks == (MedusaBlock("0.0.linear.weight", "0.0.linear.bias"),) * 3


def test_a_pickle_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    file = tmp_path / "medusa_lm_head.pt"
    torch.save({"0.0.linear.weight": torch.zeros(2, 2)}, file)
    for path in (file, tmp_path):
        with pytest.raises(CheckpointError, match="a pickle file, which llmc does not open") as caught:
            read_medusa(path)
        assert caught.value.fix is not None
        assert "weights_only=True" in caught.value.fix and "medusa_lm_head.safetensors" in caught.value.fix


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["model.norm.weight"], "holds no Medusa heads: its 1 tensors are model.norm.weight"),
        (["0.0.linear.weight", "0.2.linear.weight", "0.3.weight"], "head 0 has no layer 1: 2 of 3 are there"),
        (["0.0.linear.weight", "2.0.linear.weight"], "head 1 has no layer 0"),
        (["0.0.linear.bias"], "layer 0 of head 0 has a bias and no weight"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, names: list[str], problem: str) -> None:
    file = tmp_path / "heads.safetensors"
    save_file({name: torch.zeros(2, 2) for name in names}, file)
    with pytest.raises(CheckpointError, match=re.escape(problem)) as caught:
        read_medusa(file)
    assert caught.value.fix


def test_no_file_and_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there are no Medusa heads"):
        read_medusa(tmp_path / "nowhere.safetensors")
    broken = tmp_path / "heads.safetensors"
    broken.write_bytes(b"\x80\x00\x00")
    with pytest.raises(CheckpointError, match="truncated"):
        read_medusa(broken)
