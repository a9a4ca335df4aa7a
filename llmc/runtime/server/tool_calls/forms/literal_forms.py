"""Forms with keyword arguments, as Python or Gemma writes them."""

from llmc.runtime.server.tool_calls.form import Layout, Section, ToolForm
from llmc.runtime.server.tool_calls.json_calls import JsonCalls
from llmc.runtime.server.tool_calls.literal_calls import LiteralCalls
from llmc.runtime.server.tool_calls.literals import FUNCTION_GEMMA, GEMMA, PYTHON

_JSON = JsonCalls()
_LLAMA_JSON = JsonCalls(arguments="parameters")
_PYTHON = LiteralCalls(PYTHON, "(", ")", "=", ", ")
_PYTHON_LIST = Section("[", "]", at_start=True)

GEMMA4 = ToolForm(
    name="gemma4",
    families="Gemma 4",
    taught=(r"<\|tool_call>",),
    sections=(Section("<|tool_call>", "<tool_call|>"),),
    notations=(LiteralCalls(GEMMA, "{", "}", ":", ",", before="call:"),),
    layout=Layout(begin="<|tool_call>", end="<tool_call|>"),
)
FUNCTIONGEMMA = ToolForm(
    name="functiongemma",
    families="FunctionGemma",
    taught=("<start_function_call>",),
    sections=(Section("<start_function_call>", "<end_function_call>"),),
    notations=(LiteralCalls(FUNCTION_GEMMA, "{", "}", ":", ",", before="call:"),),
    layout=Layout(begin="<start_function_call>", end="<end_function_call>"),
)
LFM2 = ToolForm(
    name="lfm2",
    families="LFM2",
    taught=(r"<\|tool_(call|list)_start\|>",),
    sections=(Section("<|tool_call_start|>", "<|tool_call_end|>"), _PYTHON_LIST),
    notations=(_PYTHON, _JSON),
    layout=Layout(before="<|tool_call_start|>[", between=", ", after="]<|tool_call_end|>"),
)
OLMO3 = ToolForm(
    name="olmo3",
    families="OLMo 3",
    taught=("<function_calls>",),
    sections=(Section("<function_calls>", "</function_calls>"),),
    notations=(_PYTHON,),
    layout=Layout(before="<function_calls>", between="\n", after="</function_calls>"),
)
PYTHONIC = ToolForm(
    name="pythonic",
    families="Llama 4, Llama 3.2 and Gemma 3 with pythonic calls, ToolACE",
    taught=(r"\[\s*\w+\(\w+ ?=|```tool_code",),
    sections=(Section("<|python_start|>", "<|python_end|>"), Section("```tool_code", "```"), _PYTHON_LIST),
    notations=(_PYTHON, _LLAMA_JSON),
    layout=Layout(before="[", between=", ", after="]"),
    aliases=("llama4_pythonic",),
)
LLAMA3_JSON = ToolForm(
    name="llama3_json",
    families="Llama 3.1, 3.2, 3.3, Llama 4",
    taught=(r"<\|python_(tag|start)\|>|\A(?s:(?!.*\"tool_name\").*)\"parameters\"",),
    sections=(
        Section("<|python_tag|>"),
        Section("<|python_start|>", "<|python_end|>"),
        Section("{", at_start=True, is_call=True),
        _PYTHON_LIST,
    ),
    notations=(_LLAMA_JSON, _PYTHON),
    layout=Layout(between="; "),
    aliases=("llama4_json",),
)
