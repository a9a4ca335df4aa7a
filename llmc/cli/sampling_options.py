"""How a verb that generates text samples it, as options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Option

from llmc.errors import OptionError
from llmc.runtime.sampling.sampling_table import SAMPLING_NUMBERS, sampling_default

if TYPE_CHECKING:
    from llmc.runtime.grammar.grammar import Grammar
    from llmc.runtime.sampling.sampling_params import SamplingParams

# The forms of a grammar on the command line: a file, or a word for the kind and then the grammar.
FORMS = "schema.json, grammar.lark or .gbnf, json (any object), regex:EXPRESSION, choice:A|B"


def number(name: str) -> Any:
    """The option for a numeric entry of the table of sampling parameters."""
    return Option(help=SAMPLING_NUMBERS[name].help)


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """The fields of SamplingParams that texts and conversations share: allowed tokens and their probabilities."""

    panel: ClassVar[str] = "Sampling"

    top_k: Annotated[int | None, number("top_k")] = sampling_default("top_k")
    min_p: Annotated[float, number("min_p")] = sampling_default("min_p")
    typical_p: Annotated[float, number("typical_p")] = sampling_default("typical_p")
    repetition_penalty: Annotated[float, number("repetition_penalty")] = sampling_default("repetition_penalty")
    presence_penalty: Annotated[float, number("presence_penalty")] = sampling_default("presence_penalty")
    frequency_penalty: Annotated[float, number("frequency_penalty")] = sampling_default("frequency_penalty")
    dry_multiplier: Annotated[float, number("dry_multiplier")] = sampling_default("dry_multiplier")
    dry_base: Annotated[float, number("dry_base")] = sampling_default("dry_base")
    dry_allowed_length: Annotated[int, number("dry_allowed_length")] = sampling_default("dry_allowed_length")
    dry_penalty_last_n: Annotated[int | None, number("dry_penalty_last_n")] = sampling_default("dry_penalty_last_n")
    dry_sequence_breakers: Annotated[
        list[str] | None,
        Option("--dry-sequence-breaker", help='text that ends a repetition (repeatable); default: newline : " *'),
    ] = None
    bad_words: Annotated[list[str] | None, Option("--bad-word", help="never generate this text (repeatable)")] = None
    allowed_token_ids: Annotated[str | None, Option(help="generate no other tokens: 1,2,3")] = None

    def values(self) -> dict[str, Any]:
        """The given parameters by name. Raises OptionError for a value that cannot be parsed."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        changed = {field.name: value for field, value in values if value != field.default and value != []}
        ids = changed.get("allowed_token_ids")
        if ids is not None:
            try:
                changed["allowed_token_ids"] = tuple(int(text) for text in ids.split(","))
            except ValueError:
                raise OptionError(
                    f"token ids cannot be {ids!r}", at=f"--allowed-token-ids {ids}", fix="give numbers: 1,2,3"
                ) from None
        return changed


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(TokenOptions):
    """The fields of SamplingParams that the command line has."""

    max_tokens: Annotated[int, number("max_tokens")] = sampling_default("max_tokens")
    temperature: Annotated[float, number("temperature")] = sampling_default("temperature")
    top_p: Annotated[float, number("top_p")] = sampling_default("top_p")
    seed: Annotated[int | None, number("seed")] = sampling_default("seed")
    stop: Annotated[list[str] | None, Option(help="end before this text (repeatable)")] = None
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="continue after the end-of-text token")] = False
    grammar: Annotated[str | None, Option(help=f"constraint on the output: {FORMS}")] = None

    def values(self) -> dict[str, Any]:
        keywords = super().values()
        return keywords if self.grammar is None else {**keywords, "grammar": read_grammar(self.grammar)}

    def params(self) -> SamplingParams:
        """Return the sampling parameters. Raises LlmcError for a value out of range, or a grammar that cannot be
        read."""
        from llmc.runtime.sampling.sampling_params import SamplingParams

        return SamplingParams(**self.values())


def read_grammar(text: str) -> Grammar:
    """The grammar given in one of FORMS. Raises OptionError; the grammar's content is checked when it is compiled."""
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
        raise OptionError(f"{text!r:.80} is not a grammar", at="--grammar", fix=f"give {FORMS}")
    try:
        source = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise OptionError(f"the grammar cannot be read: {error}", at=f"--grammar {text}", fix=f"give {FORMS}") from None
    return Grammar(kind, source.strip() if kind is GrammarKind.REGEX else source)
