"""A request's fields as sampling parameters: the client's values, else the model's defaults, else OpenAI's."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

from llmc.engine_format import EngineFiles
from llmc.errors import EngineFormatError, RequestError
from llmc.runtime.adapters.placed_adapter import PlacedAdapter
from llmc.runtime.grammar.grammar import Grammar, GrammarKind
from llmc.runtime.requests.generation_request import GenerationRequest, Priority
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.server.errors import bad_request
from llmc.runtime.server.schemas.sampling_fields import SamplingFields
from llmc.runtime.server.schemas.structured import JsonObjectFormat, SchemaFormat, StructuredOutputs

_LEAST_TEMPERATURE = 1e-3
_SHARED = tuple(
    field.name
    for field in dataclass_fields(SamplingParams)
    if field.name in SamplingFields.model_fields and field.name != "length_penalty"
)
# Beam search takes none of these.
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "seed")


@dataclass(frozen=True)
class SamplingDefaults:
    """Default sampling parameters of requests, from the model's generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def engine_defaults(engine: EngineFiles) -> SamplingDefaults:
    """Read generation_config.json of an engine; a model without one has OpenAI's defaults."""
    file = "tokenizer/generation_config.json"
    if file not in engine:
        return SamplingDefaults()
    try:
        config = json.loads(engine.text(file))
        defaults = {name: config[name] for name in SamplingDefaults.__annotations__ if config.get(name) is not None}
        if defaults.get("top_k") == 0:
            del defaults["top_k"]
        SamplingParams(max_tokens=1, **defaults)
    except (ValueError, AttributeError, RequestError) as error:
        raise EngineFormatError(
            f"the model's generation defaults cannot be used: {error}",
            at=engine.path / file,
            fix="start with --generation-config llmc",
        ) from None
    return SamplingDefaults(**defaults)


def sampling_params(
    fields: SamplingFields,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    best_of: int | None = None,
    grammar: Grammar | None = None,
    skip_special_tokens: bool | None = None,
    seed: int | None = None,
) -> SamplingParams:
    """Raises RequestError for values that contradict each other. seed: the seed of a request that does not give one."""
    values = {
        **asdict(defaults),
        "seed": seed,
        **_given(fields),
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    values["temperature"] = _temperature(values["temperature"])
    if skip_special_tokens is not None:
        values["skip_special_tokens"] = skip_special_tokens
    if fields.use_beam_search:
        if grammar is not None:
            raise bad_request("beam search cannot be combined with structured outputs", "use_beam_search")
        beams = {name: value for name, value in values.items() if name not in _OF_SAMPLING}
        width = max(fields.n or 1, best_of or 1)
        return SamplingParams(**beams, beam_width=width, length_penalty=fields.length_penalty)
    return SamplingParams(**values, best_of=best_of, grammar=grammar)


def _given(fields: SamplingFields) -> dict[str, Any]:
    """The request's values by the names of SamplingParams, without length_penalty, which only beams have."""
    values: dict[str, Any] = {name: value for name in _SHARED if (value := getattr(fields, name)) is not None}
    if "logit_bias" in values:
        values["logit_bias"] = _bias(values["logit_bias"])
    # vLLM's and llama.cpp's ways to say all.
    for name, least in (("top_k", 1), ("dry_penalty_last_n", 0)):
        if name in values and values[name] < least:
            values[name] = None
    return values


def grammar_of(fields: SamplingFields) -> Grammar | None:
    """The grammar of response_format, structured_outputs or a guided_* field; more than one of them is an error."""
    constraints = [*_of_format(fields), *_of_structured(fields.structured_outputs), *_of_guided(fields)]
    if len(constraints) > 1:
        raise bad_request(
            f"only one constraint is allowed, not {' and '.join(name for name, _ in constraints)} together",
            constraints[1][0],
        )
    return constraints[0][1] if constraints else None


def json_schema(schema: Mapping[str, Any] | str | bool, param: str) -> Grammar:
    """A grammar of JSON that the schema allows."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"the JSON schema is not JSON: {error}", param) from None
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def engine_request(
    fields: SamplingFields,
    ids: Sequence[int],
    params: SamplingParams,
    identity: str,
    tenant: str | None,
    adapter: PlacedAdapter | None,
) -> GenerationRequest:
    """The engine's request. tenant: cached prefixes are shared within it. adapter: the adapter named as the model."""
    # vLLM's numbers (lower is earlier, 0 is usual) and OpenAI's service tier are llmc's two classes.
    urgent = fields.priority < 0 or fields.service_tier == "priority"
    return GenerationRequest(
        prompt_token_ids=tuple(ids),
        params=params,
        request_id=identity,
        priority=Priority.PREMIUM if urgent else Priority.FREE,
        deadline_seconds=fields.deadline_seconds,
        tenant=tenant,
        streams=bool(fields.stream),
        adapter=adapter,
    )


def _of_format(fields: SamplingFields) -> list[tuple[str, Grammar]]:
    form = fields.response_format
    if isinstance(form, JsonObjectFormat):
        return [("response_format", Grammar(GrammarKind.JSON_OBJECT))]
    if isinstance(form, SchemaFormat):
        return [("response_format", json_schema(form.json_schema.json_schema, "response_format"))]
    return []


def _of_structured(outputs: StructuredOutputs | None) -> list[tuple[str, Grammar]]:
    if outputs is None:
        return []
    forms = {"json": outputs.json_schema, "regex": outputs.regex, "choice": outputs.choice, "grammar": outputs.grammar}
    constraints = _of_forms("structured_outputs.", forms, "structured_outputs")
    if outputs.json_object:
        constraints.append(("structured_outputs.json_object", Grammar(GrammarKind.JSON_OBJECT)))
    if not constraints:
        raise bad_request("structured_outputs is empty: give json, regex, choice or grammar", "structured_outputs")
    return constraints


def _of_guided(fields: SamplingFields) -> list[tuple[str, Grammar]]:
    forms = {
        "json": fields.guided_json,
        "regex": fields.guided_regex,
        "choice": fields.guided_choice,
        "grammar": fields.guided_grammar,
    }
    return _of_forms("guided_", forms, "guided_json")


def _of_forms(prefix: str, given: Mapping[str, Any], param: str) -> list[tuple[str, Grammar]]:
    """The given constraints by vLLM's names, which Grammar shares. param: the field with a schema."""
    return [
        (f"{prefix}{name}", json_schema(value, param) if name == "json" else Grammar(name, value))
        for name, value in given.items()
        if value is not None
    ]


def _bias(bias: dict[str, float]) -> dict[int, float]:
    """OpenAI's keys are texts."""
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise bad_request("the keys of logit_bias are token ids, as texts", "logit_bias") from None


def _temperature(value: float) -> float:
    """Below this, dividing the logits would overflow, and the likeliest token is the only one left anyway."""
    return value if value >= _LEAST_TEMPERATURE else 0.0
