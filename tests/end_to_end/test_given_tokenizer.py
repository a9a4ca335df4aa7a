"""A model object takes text when its tokenizer comes with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llmc
from llmc.errors import CheckpointError, OptionError
from llmc.frontends.capture import capture
from llmc.frontends.given_tokenizer import given_tokenizer, with_tokenizer
from llmc.options import BuildOptions
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_model

SHIPPED = Path(__file__).parent.parent.parent / "examples/models/bard-draft"
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
VOCABULARY = 4096


def given(kind: str) -> Any:
    import tokenizers
    import transformers

    if kind == "directory":
        return SHIPPED
    if kind == "tokenizers":
        return tokenizers.Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(SHIPPED))
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "{{ tools }}" + TEMPLATE}
    return tokenizer


def test_text_in_and_text_out() -> None:
    model = tiny_model("llama", vocab_size=VOCABULARY)
    with llmc.compile(model, target="reference", tokenizer=given("transformers"), max_model_len=32) as engine:
        assert engine.generate("The king", llmc.SamplingParams(max_tokens=3, ignore_eos=True))[0].text
        (chosen,) = llmc.LLM(engine).chat([{"role": "user", "content": "The king"}], llmc.SamplingParams(max_tokens=2))
        assert chosen.prompt_tokens == len(engine.tokenize("The king\n"))
        template = engine.conversations.template(None)
        assert template.source == TEMPLATE and template.tool_source == "{{ tools }}" + TEMPLATE


@pytest.mark.parametrize("kind", quick_sample(["transformers", "tokenizers", "directory"], ["transformers"]))
def test_each_kind_gives_the_same_tokenizer(kind: str, checkpoint_of: Callable[..., Path]) -> None:
    captured = capture(checkpoint_of("llama", vocab_size=VOCABULARY, eos_token_id=None), BuildOptions())
    with given_tokenizer(given(kind)) as files:
        changed = with_tokenizer(captured, files)
        assert changed.tokenizer is not None and changed.notes == ()
        from tokenizers import Tokenizer

        read = Tokenizer.from_file(str(changed.tokenizer))
        assert read.encode("To be or not").ids == given("tokenizers").encode("To be or not").ids
        names = {file.name for file in changed.tokenizer_files}
        assert ({"chat_template.jinja", "tool_use.jinja"} <= names) == (kind == "transformers")
        # What tells the end of a text stands in tokenizer_config.json.
        assert bool(changed.graph.info.eos_token_ids) == (kind != "tokenizers")


def test_a_tokenizer_of_another_model_is_warned_of(checkpoint_of: Callable[..., Path]) -> None:
    captured = capture(checkpoint_of("llama"), BuildOptions())
    with given_tokenizer(SHIPPED) as files:
        (note,) = with_tokenizer(captured, files).notes
    assert note.startswith("the tokenizer has ") and "the model 160" in note


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    for wrong in (3, object(), tmp_path):
        with pytest.raises(OptionError, match=r"tokenizer"), given_tokenizer(wrong):
            pass
    shutil.copy(SHIPPED / "config.json", tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="the tokenizer cannot be read"), given_tokenizer(str(tmp_path)):
        pass


@pytest.mark.parametrize("text", ["[" * 100_000, "[]"])
def test_settings_that_a_chat_could_not_read_are_refused_by_the_build(text: str, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(SHIPPED, tmp_path / "model"))
    (directory / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match="JSON"):
        capture(directory, BuildOptions())
    with pytest.raises(CheckpointError, match="JSON"), given_tokenizer(directory):
        pass
