"""Schemas of tools in the grammars of calls: what no grammar can say is ignored, and limits are known at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from llmc.runtime.grammar.grammar import Grammar, GrammarKind
from llmc.runtime.grammar.matcher import grammar_tokenizer
from llmc.runtime.grammar.worker import answer_to
from llmc.runtime.server.tool_calls.call_grammar import call_grammar
from llmc.runtime.server.tool_calls.known_forms import FORMS
from llmc.runtime.server.tool_calls.tools import ANY_ARGUMENTS, tools_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB = len(BYTES) + 1


@pytest.fixture(scope="module")
def spelling(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    """A tokenizer of bytes."""
    pytest.importorskip("llguidance")
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    path: Path = tmp_path_factory.mktemp("spelling") / "tokenizer.json"
    tokenizer.save(str(path))
    return grammar_tokenizer(path, VOCAB, (VOCAB - 1,))


def grammars(form: str, schema: dict[str, Any]) -> tuple[Grammar, Grammar]:
    """Of calls alone, and beside an answer."""
    text = call_grammar(FORMS[form], tools_of({"other": ANY_ARGUMENTS, "now": schema}), lambda mark: (mark,), False)
    return Grammar(GrammarKind.EBNF, text), Grammar(GrammarKind.JSON_OBJECT, instead=text)


@pytest.mark.parametrize("form", ["hermes", "mistral_args", "qwen3_coder"])
def test_what_a_grammar_cannot_say_of_arguments_is_ignored(form: str, spelling: LLTokenizer) -> None:
    items = {"type": "string", "format": "binary", "pattern": r'^(?=%json {"a": "\\")', "contentEncoding": "base64"}
    schema = {
        "type": "object",
        "properties": {"all": {"type": "array", "uniqueItems": True, "items": items}},
        "required": ["all"],
    }
    for grammar in grammars(form, schema):
        answer = answer_to(grammar.as_json(), spelling, VOCAB)
        assert "error" not in answer, answer
        told = " ".join(answer["notes"])
        assert all(keyword in told for keyword in ("uniqueItems", "'binary'", "pattern")), told


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "pythonic"])
def test_too_many_optional_arguments_are_refused_at_once(form: str, spelling: LLTokenizer) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
    alone, beside = grammars(form, schema)
    problem = answer_to(alone.as_json(), spelling, VOCAB).get("error", "")
    assert "needs more than 2,000 items" in problem
    if form == "hermes":
        assert answer_to(beside.as_json(), spelling, VOCAB)["error"] == problem


def test_a_schema_that_nothing_fits_is_refused_without_the_grammar(spelling: LLTokenizer) -> None:
    alone, _ = grammars("hermes", {"type": "object", "properties": {"a": False}, "required": ["a"]})
    error = answer_to(alone.as_json(), spelling, VOCAB)["error"]
    assert "'a' is unsatisfiable" in error and "%json" not in error


def test_texts_and_comments_of_a_grammar_are_no_schemas(spelling: LLTokenizer) -> None:
    source = 'start: "%json {" /%json \\{/ x  // %json {\nx: %json {"const": "}", "uniqueItems": true}'
    answer = answer_to(Grammar(GrammarKind.EBNF, source).as_json(), spelling, VOCAB)
    assert "error" not in answer and "uniqueItems" in answer["notes"][0], answer
