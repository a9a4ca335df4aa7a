"""Built engines of several ranks: the tokens of one rank's, for families, odd sizes, formats and drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llmc.engine_format.reader import read_engine, read_sparsity
from llmc.runtime.loading import load
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.targets import host_target
from tests.medusa_heads import medusa_1
from tests.passes.pruning.pruned_models import calibration
from tests.runtime.ranks.conftest import LIMITS
from tests.tiny_models import FAMILIES, tiny_checkpoint, tiny_tokens

MODELS = Path(__file__).parent.parent.parent.parent / "examples" / "models"
GREEDY = SamplingParams(max_tokens=256, temperature=0.0, ignore_eos=True)
slow = pytest.mark.slow


def built(model: Path, path: Path, ranks: int, **options: Any) -> Path:
    from llmc.compiler import build

    return build(model, path, tensor_parallel_size=ranks, **{**LIMITS, "max_model_len": 320, **options}).path


def tokens(path: Path, prompts: list[list[int]], sampling: SamplingParams, **options: Any) -> list[object]:
    with load(path, threads=1, **options) as engine:
        return [completion.token_ids for completion in engine.generate(prompts, sampling)]


@pytest.mark.parametrize(
    ("family", "sizes", "ranks"),
    [
        *(pytest.param(family, {}, (2, 3, 4), marks=slow) for family in FAMILIES),
        # Two KV heads on four ranks; six heads, which do not divide; a vocabulary that does not.
        pytest.param(
            "qwen2",
            {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96, "vocab_size": 163},
            (4,),
            marks=slow,
        ),
        pytest.param(
            "llama", {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96}, (4,), marks=slow
        ),
        pytest.param("gpt2", {"vocab_size": 167}, (2, 3, 4), marks=slow),
    ],
)
def test_greedy_tokens_are_those_of_one_rank(
    family: str, sizes: dict[str, Any], ranks: tuple[int, ...], tmp_path: Path
) -> None:
    model = tiny_checkpoint(family, tmp_path / "model", **sizes)
    prompts = [tiny_tokens(33)]
    expected = tokens(built(model, tmp_path / "alone.llmc", 1), prompts, GREEDY)
    for count in ranks:
        path = built(model, tmp_path / f"{count}.llmc", count)
        assert read_engine(path).program.ranks == count
        assert tokens(path, prompts, GREEDY) == expected


@slow
@pytest.mark.parametrize("quantize", ["", "int8"])
def test_sparse_weights_are_cut_after_their_zeros_were_chosen(quantize: str, tmp_path: Path) -> None:
    """So each rank has part of the zeros of one, and all ranks together its tokens."""
    model, prompts = tiny_checkpoint("llama", tmp_path / "model", hidden_size=96), [tiny_tokens(33)]
    options = {"sparsity": "magnitude:0.5,lm_head=magnitude:0.3", "quantize": quantize}
    alone, together = (built(model, tmp_path / f"{n}.llmc", n, **options) for n in (1, 2))
    masked = [slot.layout.is_sparse for slot in read_engine(together).program.weights]
    assert any(masked) or not host_target().has("avx512_vbmi2")
    zeros = [[weight.zeros for weight in read_sparsity(read_engine(path).files)] for path in (alone, together)]
    assert zeros[0] == zeros[1]
    assert tokens(together, prompts, GREEDY) == tokens(alone, prompts, GREEDY)


@slow
def test_what_pruning_left_is_cut(tmp_path: Path) -> None:
    """Channels and layers went before; and a prompt that was seen is in the prefix cache."""
    model, prompt = tiny_checkpoint("llama", tmp_path / "model", num_hidden_layers=3), tiny_tokens(40)
    options: dict[str, Any] = {"prune": "channels=0.25,layers=1", "calibration": calibration(tmp_path)}
    alone, together = (built(model, tmp_path / f"{n}.llmc", n, **options) for n in (1, 2))
    assert len(read_engine(together).program.caches) == 2
    expected = tokens(alone, [prompt, prompt[:7]], GREEDY)
    assert tokens(together, [prompt, prompt[:7]], GREEDY) == expected
    with load(together, threads=1) as engine:
        again = [engine.generate([prompt], GREEDY)[0] for _ in range(2)]
    assert [completion.token_ids for completion in again] == [expected[0]] * 2
    assert again[0].cached_tokens == 0 and again[1].cached_tokens >= 32


@slow
@pytest.mark.parametrize(("family", "ranks"), [("mixtral", 2), ("gpt_oss", 3)])
def test_each_rank_has_some_of_the_experts_or_of_their_channels(family: str, ranks: int, tmp_path: Path) -> None:
    """Four experts on two ranks, and on three, which is uneven; a rank has fewer bytes than one with all of them."""
    model = tiny_checkpoint(family, tmp_path / "model", intermediate_size=96)
    prompts = [tiny_tokens(33), tiny_tokens(7)]
    alone = built(model, tmp_path / "alone.llmc", 1)
    expected = tokens(alone, prompts, GREEDY)
    for some in (False, True):
        path = built(model, tmp_path / f"{some}.llmc", ranks, enable_expert_parallel=some)
        assert tokens(path, prompts, GREEDY) == expected
        whole, own = (
            sum(slot.nbytes for slot in read_engine(engine_path).program.weights) for engine_path in (alone, path)
        )
        assert own < 0.7 * whole


@pytest.mark.parametrize(
    "scheme", ["w4a8", *(pytest.param(s, marks=slow) for s in ("int4-gptq:g32", "int4:g32", "mxfp4"))]
)
def test_codes_in_the_files_are_parts_of_one_ranks(scheme: str, tmp_path: Path) -> None:
    """Rounded before they were cut: the ranks' codes and scales, one after the other, are the whole weight's, byte for
    byte and in its order, but for padding at the end of each."""
    text = tmp_path / "text"
    text.write_text("To be, or not to be, that is the question. " * 400)
    options = {"calibration": text, "calibration_sequences": 4} if "gptq" in scheme else {}
    alone, together = (
        built(MODELS / "bard-draft", tmp_path / f"{n}.llmc", n, target="reference", quantize=scheme, **options)
        for n in (1, 2)
    )
    (whole,), parts = weights(alone, 1), weights(together, 2)
    cut = [name for name in whole if name in parts[0] and parts[0][name].shape != whole[name].shape]
    assert sum("codes" in name for name in cut) >= 8
    for name in cut:
        (axis,) = (i for i, size in enumerate(whole[name].shape) if parts[0][name].shape[i] != size)
        sizes = next((sizes for kind, sizes in MERGED.items() if kind in name), (whole[name].shape[axis],))
        own = [part[name].chunk(len(sizes), axis) for part in parts]
        for expected, *shards in zip(whole[name].split(sizes, axis), *own, strict=True):
            if expected.shape == shards[0].shape:
                assert all(same_bytes(part, expected) for part in shards), name
            else:
                assert same_bytes(torch.cat([without_padding(part, axis) for part in shards], axis), expected), name


# Products of one input are one: the rows of each, of which each rank has its part, as much of one as of the other. The
# single KV head is on both.
MERGED = {"gate_up": (384, 384), "q_k_v": (128, 64, 64)}


def weights(engine: Path, ranks: int) -> list[dict[str, torch.Tensor]]:
    """Each rank's, as their files hold them."""
    by_rank: list[dict[str, torch.Tensor]] = []
    for rank in range(ranks):
        by_rank.append({})
        for file in engine.glob(f"weights/rank{rank}-*"):
            by_rank[rank].update(load_file(file))
    return by_rank


def without_padding(weight: torch.Tensor, axis: int) -> torch.Tensor:
    """Up to the last place on an axis that is not all zeros."""
    used = [i for i, place in enumerate(weight.unbind(axis)) if place.contiguous().view(torch.uint8).any()]
    return weight.narrow(axis, 0, used[-1] + 1)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@slow
@pytest.mark.parametrize("options", [{}, {"quantize": "w4a8", "kv_cache": "int8"}])
def test_drafts_change_no_token(options: dict[str, Any], tmp_path: Path) -> None:
    """Of Medusa heads in trees, whose rows are moved on every rank, of text that was seen, and of a draft model of two
    ranks; the model has two heads, so no more ranks."""
    medusa_1(tmp_path / "heads.safetensors", 128, heads=3)
    changed = {"max_model_len": 256, "dtype": "auto", **options}
    path = built(MODELS / "bard-draft", tmp_path / "e.llmc", 2, speculative=tmp_path / "heads.safetensors", **changed)
    draft = built(MODELS / "bard-draft", tmp_path / "draft.llmc", 2, **changed)
    prompts = [tiny_tokens(20, 4096), [5, 9, 11] * 8]
    ways = (
        {"method": "medusa", "num_speculative_tokens": 8},
        {"method": "ngram", "num_speculative_tokens": 4},
        {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3},
    )
    for sampling in (SamplingParams(max_tokens=48, temperature=0.0), SamplingParams(max_tokens=48, seed=3)):
        expected = tokens(path, prompts, sampling)
        for way in ways:
            assert tokens(path, prompts, sampling, speculation=way) == expected
