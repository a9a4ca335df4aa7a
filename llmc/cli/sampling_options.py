"""How a verb that generates text samples it, as options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Option

from llmc.cli.grammar_argument import FORMS, read_grammar

if TYPE_CHECKING:
    from llmc.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The fields of SamplingParams that the command line has."""

    panel: ClassVar[str] = "Sampling"

    max_tokens: Annotated[int, Option(help="tokens to generate")] = 128
    temperature: Annotated[float, Option(help="0 is greedy")] = 0.0
    top_k: Annotated[int | None, Option(help="sample from the k likeliest")] = None
    top_p: Annotated[float, Option(help="sample from the smallest set with this probability")] = 1.0
    min_p: Annotated[float, Option(help="drop tokens below this share of the likeliest's probability")] = 0.0
    repetition_penalty: Annotated[float, Option(help="divides the logits of tokens seen before")] = 1.0
    presence_penalty: Annotated[float, Option(help="taken once from tokens generated before")] = 0.0
    frequency_penalty: Annotated[float, Option(help="taken per occurrence from tokens generated before")] = 0.0
    seed: Annotated[int | None, Option(help="of the sampling")] = None
    stop: Annotated[list[str] | None, Option(help="end before this text (repeatable)")] = None
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="go on after the end-of-text token")] = False
    grammar: Annotated[str | None, Option(help=f"what the output has to be: {FORMS}")] = None

    def params(self) -> SamplingParams:
        """Raises LlmcError for a value out of range, or a grammar that cannot be read."""
        from llmc.runtime.sampling_params import SamplingParams

        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values["stop"] = tuple(self.stop or ())
        values["grammar"] = None if self.grammar is None else read_grammar(self.grammar)
        return SamplingParams(**values)
