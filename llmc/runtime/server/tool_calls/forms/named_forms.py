"""Forms whose calls are a name, a mark and the arguments in JSON."""

import re

from llmc.runtime.server.tool_calls.form import Layout, Section, ToolForm
from llmc.runtime.server.tool_calls.json_calls import JsonCalls
from llmc.runtime.server.tool_calls.named_calls import NamedCalls

_JSON = JsonCalls()
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_CALLS = Section("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_MISTRAL_NAMED = NamedCalls(between="[ARGS]", identity_mark="[CALL_ID]", ends=("{",))

OPENAI = ToolForm(
    name="openai",
    families="gpt-oss",
    taught=(r"<\|channel\|>",),
    sections=(),
    notations=(NamedCalls(before="<|channel|>commentary to=functions.", between=" <|constrain|>json<|message|>"),),
    layout=Layout(),
    aliases=("harmony", "gpt_oss"),
    channels=True,
)
KIMI_K2 = ToolForm(
    name="kimi_k2",
    families="Kimi K2",
    taught=(r"<\|tool_calls?_(section_)?begin\|>",),
    sections=(Section("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
    notations=(
        NamedCalls(
            before="functions.",
            between="<|tool_call_argument_begin|>",
            name=re.compile(r"(?P<identity>(functions\.)?(?P<name>[\w.-]+?)(:\d+)?)", re.ASCII),
            numbered=":",
        ),
    ),
    layout=Layout(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    call_marks=("<|tool_call_begin|>", "<|tool_call_end|>"),
    ends_thoughts=True,
)
DEEPSEEK_V3 = ToolForm(
    name="deepseek_v3",
    families="DeepSeek V3 and R1",
    taught=("<｜tool▁calls?▁begin｜>", "```json"),
    sections=(_DEEPSEEK_CALLS, Section("<｜tool▁call▁begin｜>", is_call=True)),
    notations=(
        NamedCalls(
            before="function<｜tool▁sep｜>",
            between="\n```json\n",
            after="\n```",
            also=("<｜tool▁sep｜>",),
            leads=("function<｜tool▁sep｜>",),
            trails=("```",),
        ),
    ),
    layout=Layout("<｜tool▁calls▁begin｜>", *_DEEPSEEK_CALL, "\n", "<｜tool▁calls▁end｜>"),
    call_marks=_DEEPSEEK_CALL,
)
DEEPSEEK_V31 = ToolForm(
    name="deepseek_v31",
    families="DeepSeek V3.1",
    taught=("<｜tool▁calls?▁begin｜>",),
    sections=(_DEEPSEEK_CALLS, Section("<｜tool▁call▁begin｜>", is_call=True)),
    notations=(
        NamedCalls(between="<｜tool▁sep｜>", also=("```json",), leads=("function<｜tool▁sep｜>",), trails=("```",)),
    ),
    layout=Layout("<｜tool▁calls▁begin｜>", *_DEEPSEEK_CALL, "", "<｜tool▁calls▁end｜>"),
    call_marks=_DEEPSEEK_CALL,
)
APERTUS = ToolForm(
    name="apertus",
    families="Apertus",
    taught=(r"<\|tools_prefix\|>",),
    sections=(Section("<|tools_prefix|>", "<|tools_suffix|>"),),
    notations=(NamedCalls(before='{"', between='": ', after="}", leads=('{"',), trails=("}",)),),
    layout=Layout(before="<|tools_prefix|>[", between=", ", after="]<|tools_suffix|>"),
)
FUNCTIONARY_V3_1 = ToolForm(
    name="functionary_v3_1",
    families="Functionary 3.1, and Llama 3 where the prompt asks for it",
    taught=("<function=",),
    sections=(Section("<function="),),
    notations=(NamedCalls(between=">", trails=("</function>",)),),
    layout=Layout(begin="<function=", end="</function>"),
)
MISTRAL_ARGS = ToolForm(
    name="mistral_args",
    families="Mistral since 2025: Small 3.1 and 3.2, Magistral, Devstral, Ministral 3",
    taught=(r"\[TOOL_CALLS\]", r"\[ARGS\]"),
    sections=(Section("[TOOL_CALLS]"),),
    notations=(_MISTRAL_NAMED, _JSON),
    layout=Layout(begin="[TOOL_CALLS]"),
    short_ids=True,
)
MISTRAL = ToolForm(
    name="mistral",
    families="Mistral 7B 0.3, Mixtral 8x22B, Nemo, Large 2407",
    taught=(r"\[TOOL_CALLS\]",),
    sections=(Section("[TOOL_CALLS]"),),
    notations=(_JSON, _MISTRAL_NAMED),
    layout=Layout(before="[TOOL_CALLS] [", between=", ", after="]"),
    short_ids=True,
)
