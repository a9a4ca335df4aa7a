"""The forms that are known."""

import re
from collections.abc import Mapping

from llmc.runtime.server.tool_calls.form import ToolForm
from llmc.runtime.server.tool_calls.forms import json_forms, literal_forms, named_forms, tagged_forms

# A template is of the first one whose marks it names, so that those with more of them come first.
_ALL: tuple[ToolForm, ...] = (
    named_forms.OPENAI,
    named_forms.KIMI_K2,
    tagged_forms.DEEPSEEK_V32,
    tagged_forms.DEEPSEEK_V4,
    named_forms.DEEPSEEK_V3,
    named_forms.DEEPSEEK_V31,
    tagged_forms.MINIMAX_M2,
    tagged_forms.SEED_OSS,
    literal_forms.GEMMA4,
    literal_forms.FUNCTIONGEMMA,
    json_forms.COHERE_COMMAND,
    literal_forms.LFM2,
    literal_forms.OLMO3,
    tagged_forms.QWEN3_CODER,
    tagged_forms.GLM47,
    tagged_forms.GLM45,
    named_forms.FUNCTIONARY_V3_1,
    json_forms.INTERNLM,
    json_forms.LONGCAT,
    json_forms.GIGACHAT3,
    named_forms.APERTUS,
    json_forms.PHI4_MINI_JSON,
    json_forms.GRANITE,
    json_forms.GRANITE_20B_FC,
    named_forms.MISTRAL_ARGS,
    named_forms.MISTRAL,
    json_forms.MINIMAX,
    json_forms.HERMES,
    literal_forms.PYTHONIC,
    literal_forms.LLAMA3_JSON,
)
FORMS: Mapping[str, ToolForm] = {form.name: form for form in _ALL}
NAMES: Mapping[str, ToolForm] = {name: form for form in _ALL for name in (form.name, *form.aliases)}


def form_of_template(template: str) -> ToolForm | None:
    """The form that a chat template teaches; None if it teaches none that is known."""
    return next((form for form in _ALL if all(re.search(pattern, template) for pattern in form.taught)), None)
