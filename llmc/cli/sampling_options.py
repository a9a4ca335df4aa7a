"""How a verb that generates text samples it, as options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Option

from llmc.errors import OptionError

if TYPE_CHECKING:
    from llmc.runtime.grammar.grammar import Grammar
    from llmc.runtime.sampling.sampling_params import SamplingParams

# How a grammar is named on the command line: a file, or a word that says what kind the rest is.
FORMS = "schema.json, grammar.lark or .gbnf, json (any object), regex:EXPRESSION, choice:A|B"


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """Which tokens may come, and how likely: the fields of SamplingParams that texts and conversations share."""

    panel: ClassVar[str] = "Sampling"

    top_k: Annotated[int | None, Option(help="sample from the k likeliest")] = None
    min_p: Annotated[float, Option(help="drop tokens below this share of the likeliest's probability")] = 0.0
    typical_p: Annotated[float, Option(help="sample from the most typical ones with this probability")] = 1.0
    repetition_penalty: Annotated[float, Option(help="divides the logits of tokens seen before")] = 1.0
    presence_penalty: Annotated[float, Option(help="taken once from tokens generated before")] = 0.0
    frequency_penalty: Annotated[float, Option(help="taken per occurrence from tokens generated before")] = 0.0
    dry_multiplier: Annotated[float, Option(help="DRY: taken from a token that would go on repeating; 0 is off")] = 0.0
    dry_base: Annotated[float, Option(help="times this for every token more that is repeated")] = 1.75
    dry_allowed_length: Annotated[int, Option(help="repetitions shorter than this cost nothing")] = 2
    dry_penalty_last_n: Annotated[int | None, Option(help="how many tokens it looks back; default: all")] = None
    dry_sequence_breakers: Annotated[
        list[str] | None,
        Option("--dry-sequence-breaker", help='no repetition goes across it (repeatable); default: newline : " *'),
    ] = None
    bad_words: Annotated[list[str] | None, Option("--bad-word", help="never generate this text (repeatable)")] = None
    allowed_token_ids: Annotated[str | None, Option(help="generate no other tokens: 1,2,3")] = None

    def values(self) -> dict[str, Any]:
        """What was given, by name. Raises OptionError for ids that are no numbers."""
        given = ((field, getattr(self, field.name)) for field in fields(TokenOptions))
        found = {field.name: value for field, value in given if value != field.default and value != []}
        ids = found.get("allowed_token_ids")
        if ids is not None:
            try:
                found["allowed_token_ids"] = tuple(int(each) for each in ids.split(","))
            except ValueError:
                raise OptionError(
                    f"token ids cannot be {ids!r}", at=f"--allowed-token-ids {ids}", fix="give numbers: 1,2,3"
                ) from None
        return found


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(TokenOptions):
    """The fields of SamplingParams that the command line has."""

    max_tokens: Annotated[int, Option(help="tokens to generate")] = 128
    temperature: Annotated[float, Option(help="0 is greedy")] = 0.0
    top_p: Annotated[float, Option(help="sample from the smallest set with this probability")] = 1.0
    seed: Annotated[int | None, Option(help="of the sampling")] = None
    stop: Annotated[list[str] | None, Option(help="end before this text (repeatable)")] = None
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="go on after the end-of-text token")] = False
    grammar: Annotated[str | None, Option(help=f"what the output has to be: {FORMS}")] = None

    def params(self) -> SamplingParams:
        """Raises LlmcError for a value out of range, or a grammar that cannot be read."""
        from llmc.runtime.sampling.sampling_params import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=tuple(self.stop or ()),
            ignore_eos=self.ignore_eos,
            grammar=None if self.grammar is None else read_grammar(self.grammar),
            **self.values(),
        )


def read_grammar(text: str) -> Grammar:
    """The grammar that one of FORMS names. Raises OptionError; what the grammar says is checked when it is compiled."""
    from llmc.runtime.grammar.grammar import Grammar, GrammarKind

    word, colon, rest = text.partition(":")
    if text == "json":
        return Grammar(GrammarKind.JSON_OBJECT)
    if colon and word in ("regex", "choice"):
        return Grammar(word, rest if word == "regex" else rest.split("|"))
    kinds = {
        ".json": GrammarKind.JSON_SCHEMA,
        ".lark": GrammarKind.EBNF,
        ".gbnf": GrammarKind.EBNF,
        ".ebnf": GrammarKind.EBNF,
        ".regex": GrammarKind.REGEX,
    }
    kind = kinds.get(Path(text).suffix)
    if kind is None:
        raise OptionError(f"{text!r:.80} names no grammar", at="--grammar", fix=f"give {FORMS}")
    try:
        source = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise OptionError(f"the grammar cannot be read: {error}", at=f"--grammar {text}", fix=f"give {FORMS}") from None
    return Grammar(kind, source.strip() if kind is GrammarKind.REGEX else source)
