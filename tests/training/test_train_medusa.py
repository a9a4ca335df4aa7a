"""Training heads: what an engine shows of itself, that every head and layer learns, and files that builds take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import llmc
from llmc.engine_format import read_engine
from llmc.errors import OptionError
from llmc.frontends.drafts.medusa import read_medusa
from llmc.runtime.text.conversation import ConversationPrompts
from llmc.training.engine_states import Rows, StateReader, is_enough, output_matrix
from llmc.training.fit_heads import Samples, _Vocabulary, acceptance, fit
from llmc.training.medusa_heads import MedusaHeads
from llmc.training.train_medusa import TrainedHeads
from llmc.training.written import begun, written
from tests.conftest import DRAFT

TEXT = DRAFT.parent.parent / "data" / "calibration.txt"
FEW: dict[str, Any] = {"heads": 2, "tokens": 5000, "epochs": 8, "threads": 1}


@pytest.fixture(scope="module")
def trained(draft_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedHeads:
    return llmc.train_medusa(draft_engine, TEXT, tmp_path_factory.mktemp("heads") / "heads.safetensors", **FEW)


def test_an_engine_shows_hidden_states_and_its_output_matrix(draft_engine: Path) -> None:
    """The matrix that follows from states and logits is the checkpoint's, which is tied to the embeddings."""
    reader = StateReader(read_engine(draft_engine), 1)
    generator = torch.Generator().manual_seed(1)
    rows = [reader.read(torch.randint(3, 4096, (100,), generator=generator).tolist()) for _ in range(8)]
    reader.close()
    assert rows[0].states.shape == (99, 128) and rows[0].logits.shape == (99, 4096)
    matrix = load_file(DRAFT / "model.safetensors")["model.embed_tokens.weight"].float()
    assert (output_matrix(rows) - matrix).norm() / matrix.norm() < 1e-3


def test_logits_that_something_else_follows_are_no_product_of_states(draft_engine: Path) -> None:
    """A launch after the product changes logits in a way that heads do not learn."""
    directory = read_engine(draft_engine)
    norm = next(launch for launch in directory.program.launches if "x" in launch.arguments)
    after = replace(norm, only=None, wanted=(), arguments={"in0": norm.arguments["x"]})
    program = replace(directory.program, launches=(*directory.program.launches, after))
    with pytest.raises(OptionError, match="shows no hidden states"):
        StateReader(replace(directory, program=program), 1)


def test_what_is_learned_is_what_the_engine_goes_on_with(draft_engine: Path) -> None:
    with llmc.load(draft_engine, threads=1) as engine:
        text = TEXT.read_text(encoding="utf-8")[:2000]
        told: list[int] = []
        asked = begun(engine, engine.limits, text, tokens=150, seed=0, chat=False)
        first, second = (writing.tokens for writing in written(engine, asked, 0.0, 0, told.append))
        assert told == [2]
        assert len(first) == len(second) == 96 and first[:24] != second[:24]
        for sequence in (first, second):
            assert engine.generate([sequence[:24]], max_tokens=72)[0].token_ids == (*sequence[24:],)


def test_heads_learn_what_the_engine_writes(trained: TrainedHeads) -> None:
    assert trained.losses[-1] < trained.losses[0] - 2
    assert all(head.top_5 > head.top_1 > 0.1 for head in trained.heads)
    assert trained.tokens > 4000 and 1 <= trained.epochs <= 8


def test_what_is_written_is_the_published_format(trained: TrainedHeads) -> None:
    checkpoint = read_medusa(trained.path.parent)
    assert [len(head.blocks) for head in checkpoint.heads] == [1, 1]
    assert list(checkpoint.source.names()) == [f"{h}.0.linear.{kind}" for h in range(2) for kind in ("bias", "weight")]
    config = json.loads((trained.path.parent / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"], config["hidden_size"]) == (2, 1, 128)


def test_heads_of_a_chat_learn_the_answers_alone(draft_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts go through the template; rows begin where the prompt's last token says what comes next."""
    with llmc.load(draft_engine, threads=1) as engine:
        text = TEXT.read_text(encoding="utf-8")[:2000]
        template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
        monkeypatch.setattr(ConversationPrompts, "_own_template", engine.conversations.template(template))
        asked = begun(engine, engine.limits, text, tokens=90, seed=0, chat=True)
        (sequence,) = written(engine, asked, 0.0, 0, lambda done: None)
    assert engine.detokenize(asked[0]).startswith("<user>") and sequence.tokens[: sequence.prompt] == asked[0]
    places = torch.arange(len(sequence.tokens))
    rows = Rows(places, places[:-1, None].float(), torch.zeros(len(places) - 1, 3)).after(sequence.prompt)
    assert rows.states[0] == sequence.prompt - 1 and rows.tokens[1] == sequence.prompt


def test_few_rows_of_logits_are_kept() -> None:
    rows = Rows(torch.arange(10), torch.zeros(9, 2), torch.zeros(9, 50_000))
    assert is_enough([rows]) and not is_enough([rows.after(3)]) and not is_enough([])
    assert rows.without_logits().logits.untyped_storage().nbytes() == 0


def test_a_drawn_vocabulary_expects_the_loss_of_the_whole_one() -> None:
    """And heads that see drawn tokens learn to say the right ones of all."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(9000, 8, generator=generator) * 0.3
    states, wanted = torch.randn(64, 8, generator=generator), torch.randint(0, 500, (64, 1), generator=generator)
    samples = Samples(states, wanted, torch.ones(64, 1, dtype=torch.bool))
    drawn = _Vocabulary(matrix, samples, generator)
    losses = [float(drawn.drawn()(states, wanted[:, 0])) for _ in range(20)]
    whole = float(torch.nn.functional.cross_entropy(states @ matrix.T, wanted[:, 0]))
    assert len(set(losses)) > 1 and abs(sum(losses) / 20 - whole) < 0.01 * whole
    all_written = replace(samples, wanted=torch.arange(64)[:, None])
    small = _Vocabulary(matrix[:2112], all_written, generator).drawn()
    exact = torch.nn.functional.cross_entropy(states @ matrix[:2112].T, torch.arange(64))
    assert float(small(states, all_written.wanted[:, 0])) == float(exact)


def test_the_same_seed_gives_the_same_heads(draft_engine: Path, tmp_path: Path) -> None:
    fewer = {**FEW, "tokens": 600, "epochs": 2}
    first, again = (llmc.train_medusa(draft_engine, TEXT, tmp_path / f"{n}.safetensors", **fewer) for n in range(2))
    assert again.path.read_bytes() == first.path.read_bytes()


def test_first_head_untrained() -> None:
    """A fault of others: every head, the first one too, gets gradients, and comes to say what it is about."""
    heads, matrix, samples = _problem(heads=3, layers=1)
    before = {name: value.clone() for name, value in heads.tensors().items()}
    fit(heads, matrix, samples, samples, 40, 0, lambda done: None)
    for name, value in heads.tensors().items():
        assert not torch.equal(value, before[name]), name
    assert all(acceptance(heads, matrix, samples, head).top_1 > 0.9 for head in range(3))


def test_shared_resblock() -> None:
    """A fault of others: the layers of a head are blocks of their own, and stay different."""
    heads, matrix, samples = _problem(heads=1, layers=2)
    fit(heads, matrix, samples, samples, 10, 0, lambda done: None)
    tensors = heads.tensors()
    assert not torch.allclose(tensors["0.0.linear.weight"], tensors["0.1.linear.weight"], atol=1e-3)


def test_training_stops_where_the_loss_falls_no_more() -> None:
    heads, matrix, samples = _problem(heads=1, layers=1)
    apart = Samples(torch.randn(64, 16), torch.randint(0, 12, (64, 1)), torch.ones(64, 1, dtype=torch.bool))
    losses = fit(heads, matrix, samples, apart, 60, 0, lambda done: None)
    assert len(losses) < 60, "noise is kept apart, which cannot be learnt"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"heads": 0}, "heads cannot be 0"),
        ({"tokens": 1.5}, "tokens cannot be 1.5"),
        ({"text": "nowhere.txt"}, "the text cannot be read"),
        ({"output": "heads.bin"}, "heads.bin is not a .safetensors file"),
    ],
)
def test_what_cannot_be_is_refused(draft_engine: Path, tmp_path: Path, values: dict[str, object], problem: str) -> None:
    given = {"text": str(TEXT), "output": str(tmp_path / "heads.safetensors"), **values}
    if values.get("output"):
        given["output"] = str(tmp_path / str(values["output"]))
    with pytest.raises(OptionError, match=problem) as caught:
        llmc.train_medusa(draft_engine, **given)  # type: ignore[arg-type]
    assert caught.value.fix


def test_the_configuration_of_a_model_is_not_overwritten(draft_engine: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(OptionError, match="that is not of Medusa heads"):
        llmc.train_medusa(draft_engine, TEXT, tmp_path / "heads.safetensors")


def test_a_text_that_is_too_short(draft_engine: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("My lord")
    with pytest.raises(OptionError, match=r"the text has \d+ tokens, and a prompt takes 24"):
        llmc.train_medusa(draft_engine, text, tmp_path / "heads.safetensors")


def _problem(heads: int, layers: int) -> tuple[MedusaHeads, torch.Tensor, Samples]:
    """States of twelve kinds; the token that head i is about follows from the kind."""
    generator = torch.Generator().manual_seed(0)
    centres, matrix = torch.randn(12, 16, generator=generator), torch.randn(12, 16, generator=generator)
    kinds = torch.randint(0, 12, (3000,), generator=generator)
    states = centres[kinds] + 0.05 * torch.randn(3000, 16, generator=generator)
    wanted = (kinds[:, None] + 1 + torch.arange(heads)) % 12
    samples = Samples(states, wanted, torch.ones(3000, heads, dtype=torch.bool))
    return MedusaHeads(16, heads, layers, torch.Generator().manual_seed(1)), matrix, samples
