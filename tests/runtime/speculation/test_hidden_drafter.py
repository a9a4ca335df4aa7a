"""Drafts from hidden states are those of a plain oracle that computes all anew, whatever the engine has cached."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from llmc import Engine, SamplingParams, load
from llmc.compiler import build
from llmc.engine_format import read_engine
from llmc.engine_format.reader import DRAFT, SHARED_NAME
from llmc.errors import EngineFormatError, OptionError
from llmc.runtime.executors.executor import Executor
from llmc.runtime.loop.step import Step
from llmc.runtime.requests.request import SampledRequest
from llmc.runtime.speculation.best_tree import Candidate
from llmc.runtime.speculation.candidates import Following, Place, TreeCandidates
from llmc.runtime.speculation.draft import Draft
from llmc.runtime.speculation.hidden_drafter import HiddenDrafter
from llmc.runtime.speculation.rank_truth import RankTruth
from tests import draft_checkpoints as drafts
from tests import latent_expert_layer
from tests.quick_sample import quick_sample
from tests.runtime.speculation.guesses import proposed
from tests.tiny_models import tiny_checkpoint, tiny_tokens

pytestmark = pytest.mark.usefixtures("open_gate")
LAYERS, MOST = [1, 2, 4], 4
GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
KINDS = ("eagle3", "mtp", "mtp_layers")
# Of tests that look at requests and steps, not at what a draft reads.
ONE_KIND = pytest.mark.parametrize("built", quick_sample(KINDS, ["eagle3"]), indirect=True)


@dataclass(frozen=True)
class Built:
    """An engine with a draft. states: of the model after these tokens. layers: each one's logits and hidden states of
    rows of tokens and of the hidden states before them, those of the model or of the layer before."""

    method: str
    path: Path
    states: Callable[[Tensor], Tensor]
    layers: Sequence[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]
    target_ids: Tensor

    def expected(self, tokens: Sequence[int], count: int) -> list[int]:
        """The drafts after these tokens."""
        drafted: list[int] = []
        for _ in range(count):
            drafted.append(int(self.target_ids[self.logits(tokens, drafted).argmax()]))
        return drafted

    def logits(self, tokens: Sequence[int], drafts: Sequence[int]) -> Tensor:
        """Of what follows these drafts."""
        ids, states = torch.tensor([*tokens, *drafts]), self.states(torch.tensor(tokens[:-1]))
        for number, layer in enumerate(self.layers[: len(drafts) + 1], 1):
            read = states
            logits, states = layer(ids[number : number + len(read)], read)
        for _ in range(len(self.layers), len(drafts) + 1):
            read = torch.cat((read, states[-1:]))
            logits, states = layer(ids[number : number + len(read)], read)
        return logits[-1]


def _model_states(model: Path) -> Callable[[Tensor], tuple[list[Tensor], Tensor]]:
    """The hidden state before each layer and after the last, and the one after the last norm. Each draft after the same
    tokens asks for them."""
    auto: Any = AutoModelForCausalLM
    loaded = auto.from_pretrained(model, dtype=torch.float32)
    last: list[Tensor] = []
    loaded.model.norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0][0]))

    @cache
    def states(ids: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
        with torch.no_grad():
            outputs = loaded(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        return [*(state[0] for state in outputs[:-1]), last.pop()], outputs[-1][0]

    return lambda ids: states(tuple(ids.tolist()))


def _limits() -> dict[str, Any]:
    return {"target": "reference", "max_model_len": 96, "max_batch_tokens": 32, "max_sequences": 6, "block_size": 8}


@pytest.fixture(scope="session")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Built:
    directory = tmp_path_factory.mktemp("eagle3")
    model = tiny_checkpoint("llama", directory / "model", tie_word_embeddings=False, num_hidden_layers=4)
    draft = drafts.eagle3(directory / "draft", eagle_aux_hidden_state_layer_ids=LAYERS)
    build(model, directory / "engine.llmc", speculative=draft, **_limits())
    tensors, states = load_file(draft / "model.safetensors"), _model_states(model)
    embeddings = load_file(model / "model.safetensors")["model.embed_tokens.weight"]

    def combined(ids: Tensor) -> Tensor:
        layer_states, _ = states(ids)
        return drafts.combined(tensors, torch.cat([layer_states[layer] for layer in LAYERS], dim=-1), {})

    return Built(
        "eagle3",
        directory / "engine.llmc",
        combined,
        [lambda ids, hidden: drafts.eagle3_logits(tensors, ids, hidden, embeddings, {})],
        torch.arange(drafts.DRAFT_VOCAB) + tensors["d2t"],
    )


@pytest.fixture(scope="session")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> Built:
    directory = tmp_path_factory.mktemp("mtp")
    model = tiny_checkpoint("llama", directory / "model", tie_word_embeddings=False, num_hidden_layers=4)
    states = _model_states(drafts.add_qwen_mtp(model))
    build(model, directory / "engine.llmc", speculative="mtp", **_limits())
    tensors = load_file(model / "model.safetensors")
    names = {**drafts.QWEN, "layer": "mtp.layers.0.", "norm": "mtp.norm"}
    embeddings, output = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    return Built(
        "mtp",
        directory / "engine.llmc",
        lambda ids: states(ids)[1],
        [lambda ids, hidden: drafts.mtp_logits(tensors, names, ids, hidden, embeddings, output)],
        torch.arange(drafts.VOCAB),
    )


@pytest.fixture(scope="session")
def mtp_layers(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Two, as DeepSeek's: the third draft is the second layer's again. The first has copies of the model's tables."""
    directory = tmp_path_factory.mktemp("mtp_layers")
    model = tiny_checkpoint("llama", directory / "model", tie_word_embeddings=False, num_hidden_layers=4)
    states, numbers = _model_states(model), (4, 5)
    for number in numbers:
        drafts.add_deepseek_mtp(model, number)
    tables = load_file(model / "model.safetensors")
    copies = {"embed_tokens": tables["model.embed_tokens.weight"], "shared_head.head": tables["lm_head.weight"]}
    drafts.added(model, {f"model.layers.4.{name}.weight": table.clone() for name, table in copies.items()})
    build(model, directory / "engine.llmc", speculative="mtp", **_limits())
    tensors = load_file(model / "model.safetensors")
    return Built(
        "mtp",
        directory / "engine.llmc",
        lambda ids: states(ids)[1],
        [partial(_deepseek_layer, tensors, number) for number in numbers],
        torch.arange(drafts.VOCAB),
    )


def _deepseek_layer(
    tensors: Mapping[str, Tensor], number: int, ids: Tensor, hidden: Tensor, **layer: Any
) -> tuple[Tensor, Tensor]:
    names, embeddings = drafts.deepseek_names(number), tensors["model.embed_tokens.weight"]
    output = tensors[f"model.layers.{number}.shared_head.head.weight"]
    return drafts.mtp_logits(tensors, names, ids, hidden, embeddings, output, **layer)


@pytest.mark.slow
def test_drafts_of_latent_attention_and_experts_are_those_of_the_oracle(
    tmp_path: Path, proposals: list[tuple[list[int], list[int], int]]
) -> None:
    """Of a DeepSeek-V3 with two layers more, compiled for this machine; and answers are those without drafts."""
    model = latent_expert_layer.deepseek_checkpoint(tmp_path / "model")
    states, numbers = _model_states(model), (2, 3)
    for number in numbers:
        drafts.add_deepseek_mtp(model, number, latent_expert_layer.layer_tensors)
    build(model, tmp_path / "engine.llmc", speculative="mtp", **{**_limits(), "target": "cpu"})
    layers = [partial(_deepseek_layer, load_file(model / "model.safetensors"), number) for number in numbers]
    with_experts = [partial(layer, layer=latent_expert_layer.layer) for layer in layers]
    ids = torch.arange(drafts.VOCAB)
    built = Built("mtp", tmp_path / "engine.llmc", lambda ids: states(ids)[1], with_experts, ids)
    prompts = [tiny_tokens(5), tiny_tokens(60)[20:], tiny_tokens(90)[40:57]]
    params = [GREEDY, SamplingParams(max_tokens=12, temperature=0.8, seed=3), GREEDY]
    with load(built.path) as plain:
        expected = [completion.choices[0].token_ids for completion in plain.generate(prompts, params)]
    with opened(built) as engine:
        assert [completion.choices[0].token_ids for completion in engine.generate(prompts, params)] == expected
        proposals.clear()
        for prompt in prompts:
            engine.generate(prompt, GREEDY)
        check(built, proposals, 18)


@pytest.fixture(params=quick_sample(KINDS, ["eagle3"]))
def built(request: pytest.FixtureRequest) -> Built:
    model: Built = request.getfixturevalue(request.param)
    return model


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int], int]]:
    """The tokens of each request that asked, its drafts, and how many it asked for."""
    seen: list[tuple[list[int], list[int], int]] = []
    real = HiddenDrafter.propose

    def propose(self: HiddenDrafter, requests: Sequence[SampledRequest], most: Sequence[int]) -> list[Draft]:
        drafts_of_step = proposed(real(self, requests, most))
        for request, draft, count in zip(requests, drafts_of_step, most, strict=True):
            seen.append((list(request.tokens), list(draft.tokens), count))
        return drafts_of_step

    monkeypatch.setattr(HiddenDrafter, "propose", propose)
    return seen


def opened(built: Built, width: int = 1, **options: Any) -> Engine:
    speculation = {"method": built.method, "num_speculative_tokens": MOST, "tree_width": width}
    return load(built.path, speculation=speculation, **options)


def check(built: Built, proposals: list[tuple[list[int], list[int], int]], least: int) -> None:
    """All are there, and right."""
    assert sum(bool(drafted) for _, drafted, _ in proposals) >= least
    for tokens, draft, count in proposals:
        assert draft == built.expected(tokens, count), f"after {len(tokens)} tokens"
    proposals.clear()


def test_drafts_are_those_of_the_oracle(built: Built, proposals: list[tuple[list[int], list[int], int]]) -> None:
    """Of prompts read in one step and in several, of one request and of many."""
    prompts = [tiny_tokens(5), tiny_tokens(60)[20:], tiny_tokens(90)[40:57]]
    with opened(built, prefix_cache=False) as engine:
        engine.generate(prompts[0], GREEDY)
        check(built, proposals, 6)
        engine.generate(prompts, GREEDY)
        check(built, proposals, 18)
    with opened(built, prefix_cache=False, max_step_tokens=7) as engine:
        engine.generate(tiny_tokens(15), GREEDY)
        check(built, proposals, 6)
        engine.generate(prompts[1:], GREEDY)
        check(built, proposals, 12)


# Several layers draft chains.
@ONE_KIND
def test_what_a_draft_shares_with_its_model_is_stored_once(built: Built) -> None:
    shared = json.loads((built.path / DRAFT / SHARED_NAME).read_text(encoding="utf-8"))
    assert [*shared.values()] == ["model_embed_tokens_weight"]


@pytest.mark.parametrize("built", quick_sample(["eagle3", "mtp"], ["eagle3"]), indirect=True)
def test_trees_are_those_of_the_oracle(
    built: Built, proposals: list[tuple[list[int], list[int], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may follow each node that is read is what the oracle says, whose own path leads there. Shares by rank make
    trees broad and deep at once: in the end ten nodes, of which the best are kept."""
    said: list[tuple[list[int], list[int], list[int]]] = []
    real = TreeCandidates.after

    def after(self: TreeCandidates, executor: Executor, step: Step, places: Sequence[Place]) -> list[Following]:
        followings = [answer for answer in real(self, executor, step, places) if isinstance(answer, Following)]
        for (request, path), following in zip(places, followings, strict=True):
            said.append((list(request.tokens), list(path), [candidate.token for candidate in following.candidates]))
        shares = (0.6, 0.3, 0.05)
        return [
            Following(
                [
                    Candidate(candidate.token, share)
                    for candidate, share in zip(continuation.candidates, shares, strict=False)
                ]
            )
            for continuation in followings
        ]

    monkeypatch.setattr(TreeCandidates, "after", after)
    monkeypatch.setattr(RankTruth, "likely", lambda self, shares, depth: shares)
    with load(built.path) as plain:
        prompts = [tiny_tokens(5), tiny_tokens(60)[20:]]
        expected = [completion.choices[0].token_ids for completion in plain.generate(prompts, GREEDY)]
    given = {"method": built.method, "num_speculative_tokens": 8, "tree_width": 3}
    with load(built.path, speculation=given) as engine:
        assert [completion.choices[0].token_ids for completion in engine.generate(prompts, GREEDY)] == expected
    assert {len(path) for _, path, _ in said} >= {0, 1, 2, 3}
    for tokens, path, candidates in said[:40]:
        logits = built.logits(tokens, path)
        assert candidates[:3] == built.target_ids[logits.topk(3).indices].tolist(), (len(tokens), path)


def test_drafts_after_a_cached_prefix_are_the_same(
    built: Built, proposals: list[tuple[list[int], list[int], int]]
) -> None:
    """Also where another token follows than the one that the draft has read there: vllm #51769 drops a block for it."""
    first = tiny_tokens(40)
    with opened(built) as engine:
        engine.generate(first, GREEDY)
        check(built, proposals, 6)
        for prompt in (first, [*first[:32], 3, 4], [*first[:24], 9], first[:17]):
            (completion,) = engine.generate(prompt, GREEDY)
            assert completion.cached_tokens >= 16
            check(built, proposals, 6)


@ONE_KIND
def test_choices_and_preempted_requests_draft_the_same(
    built: Built, proposals: list[tuple[list[int], list[int], int]]
) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.9, seed=4, n=2)
    with load(built.path) as plain:
        expected = [c.token_ids for c in plain.generate(tiny_tokens(19), params)[0].choices]
    with opened(built) as engine:
        (completion,) = engine.generate(tiny_tokens(19), params)
        assert [c.token_ids for c in completion.choices] == expected
        proposals.clear()
    blocks = 96 // 8
    caches = 4 + len(built.layers)
    with opened(built, kv_cache_bytes=blocks * 8 * caches * 2 * 2 * 16 * 4) as engine:
        long = SamplingParams(max_tokens=26, temperature=0.0, ignore_eos=True)
        engine.generate([tiny_tokens(30), tiny_tokens(60)[29:], tiny_tokens(90)[55:]], long)
        assert engine.loop.scheduler.preemptions
        check(built, proposals, 12)
        assert engine.loop.pool.used == 0


@ONE_KIND
def test_drafts_begin_again_after_a_time_without(
    built: Built, proposals: list[tuple[list[int], list[int], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was computed meanwhile is left out of the draft's cache, which begins at the next block. Answers are the
    same."""
    prompt = tiny_tokens(20)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with load(built.path) as plain:
        expected = plain.generate(prompt, params)[0].choices[0].token_ids
    steps = iter(range(1000))
    with opened(built) as engine:
        gate = engine.loop.speculation._gate  # type: ignore[union-attr]
        monkeypatch.setattr(gate, "drafts", lambda requests, room: 0 if 4 < next(steps) < 12 else MOST)
        assert engine.generate(prompt, params)[0].choices[0].token_ids == expected
    given = [bool(draft) for _, draft, count in proposals if count]
    first_without = given.index(False)
    assert all(given[:first_without]) and 1 <= given.count(False) <= 10 and given[-1]


def test_an_engine_without_a_draft_says_how_to_build_one(built: Built) -> None:
    other = "mtp" if built.method == "eagle3" else "eagle3"
    with pytest.raises(OptionError, match=f"a draft for '{built.method}', not for '{other}'"):
        load(built.path, speculation={"method": other, "num_speculative_tokens": 2})
    with pytest.raises(OptionError, match="without draft layers for the method 'mtp'") as caught:
        last = built.path.joinpath(*["draft"] * len(built.layers))
        load(last, speculation={"method": "mtp", "num_speculative_tokens": 2})
    assert "--speculative" in str(caught.value.fix)


def test_tables_are_stored_once(mtp_layers: Built, tmp_path: Path) -> None:
    """Where the draft has the model's or a copy of them, also through the engine between; others are its own."""
    outer = mtp_layers.path
    places = {}
    for inner in (outer / "draft", outer / "draft" / "draft"):
        engine = read_engine(inner)
        slots = zip(engine.program.weights, engine.tensors, strict=True)
        places[inner] = sorted(stored.path.parents[1] for slot, stored in slots if slot.shape[0] == drafts.VOCAB)
    first, second = places
    assert places == {first: [outer, outer], second: [outer, second]}
    shutil.copytree(first, tmp_path / "alone")
    with pytest.raises(EngineFormatError, match=r"no manifest.json"):
        read_engine(tmp_path / "alone")
