"""Models whose indexers choose among keys equal transformers in contexts of more keys than are chosen."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmc.architectures.survey import TOLERANCE
from llmc.architectures.tiny_config import tiny_config
from llmc.compiler import build
from llmc.frontends.capture import capture
from llmc.graph.call_arguments import call_arguments
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from llmc.runtime.engine import Engine
from llmc.runtime.loading import load
from tests.end_to_end.company import least_cache_bytes

TOKENS = [(7 + 37 * i + i * i) % 150 + 3 for i in range(40)]
CHOSEN = 12
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("axk2", "dots3_note_text", "glm_moe_dsa")]


def sparse_model(model_type: str) -> Any:
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type)
    # So many heads that hardly any key scores zero for all of them: transformers may choose any of equal ones.
    config.index_topk, config.index_n_heads = CHOSEN, 8
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM
    return made.from_config(config, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory, whose capture is found again."""
    directory = tmp_path_factory.mktemp("deepseek_v32")
    sparse_model("deepseek_v32").save_pretrained(directory)
    return directory


@pytest.mark.parametrize("target", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_type", ["deepseek_v32", *SLOW])
def test_logits_equal_in_longer_contexts(model_type: str, target: str, deepseek: Path, tmp_path: Path) -> None:
    model = sparse_model(model_type)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    given = deepseek if model_type == "deepseek_v32" else model
    build(given, tmp_path / "engine.llmc", target=target, dtype="float32", max_model_len=64)
    with load(tmp_path / "engine.llmc") as engine:
        actual = engine.logits(TOKENS)
    assert np.abs(actual - expected).max() <= TOLERANCE * expected.std()


def test_their_keys_come_back_from_a_second_tier(deepseek: Path, tmp_path: Path) -> None:
    """Blocks that leave the cache carry the keys that indexers choose by: other bits would choose other tokens."""
    limits: dict[str, Any] = {"max_model_len": 64, "max_sequences": 4, "max_batch_tokens": 32, "block_size": 8}
    build(deepseek, tmp_path / "engine.llmc", target="cpu", dtype="float32", **limits)

    def answers(engine: Engine) -> list[object]:
        prompts = [[token + number for token in TOKENS[:30]] for number in range(5)]
        texts = engine.generate(prompts, max_tokens=20, ignore_eos=True, logprobs=1)
        return [(text.choices[0].token_ids, repr(text.choices[0].logprobs)) for text in texts]

    with load(tmp_path / "engine.llmc", threads=1) as engine:
        expected = answers(engine)
    least = least_cache_bytes(tmp_path / "engine.llmc")
    with load(tmp_path / "engine.llmc", threads=1, kv_cache_bytes=least, kv_offloading_size="50MB") as engine:
        assert answers(engine) == expected and answers(engine) == expected
        tier = engine.loop.scheduler.second_tier
        assert engine.loop.scheduler.preemptions and tier is not None and tier.stats.hits


def test_attention_sees_what_is_chosen(deepseek: Path) -> None:
    """Each layer has an indexer."""
    graph = capture(deepseek, BuildOptions(dtype="float32")).graph.graph
    attentions = graph.find_nodes(op="call_function", target=torch.ops.llmc.attention.default)
    choices = graph.find_nodes(op="call_function", target=torch.ops.llmc.choose_keys.default)
    assert len(attentions) == len(choices) == 2
    assert [call_arguments(node)["count"] for node in choices] == [CHOSEN] * 2
    assert all(call_arguments(node)["chosen"] is not None for node in attentions)


def test_shorter_engines_choose_nothing(deepseek: Path) -> None:
    options = BuildOptions(max_model_len=CHOSEN, dtype="float32")
    short = run_pipeline(capture(deepseek, options).graph, default(), options).graph
    assert not short.graph.find_nodes(op="call_function", target=torch.ops.llmc.paged_choose_keys.default)
    assert len(short.caches) == 2
