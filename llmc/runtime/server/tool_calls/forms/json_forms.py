"""Forms whose calls are JSON objects."""

from llmc.runtime.server.tool_calls.form import Layout, Section, ToolForm
from llmc.runtime.server.tool_calls.json_calls import JsonCalls

_JSON = JsonCalls()
_TAG = Section("<tool_call>", "</tool_call>")
_TAG_LINES = Layout(begin="<tool_call>\n", end="\n</tool_call>", between="\n")

COHERE_COMMAND = ToolForm(
    name="cohere_command",
    families="Command R7B, Command A",
    taught=(r"<\|START_ACTION\|>",),
    sections=(Section("<|START_ACTION|>", "<|END_ACTION|>"),),
    notations=(JsonCalls("tool_name", "parameters", before_name='"tool_call_id": "0", '),),
    layout=Layout(before="<|START_ACTION|>[\n    ", between=",\n    ", after="\n]<|END_ACTION|>"),
)
GIGACHAT3 = ToolForm(
    name="gigachat3",
    families="GigaChat 3",
    taught=(r"<\|role_sep\|>", "function.call"),
    sections=(Section("function call<|role_sep|>"), Section("<|function_call|>")),
    notations=(_JSON,),
    layout=Layout(before="function call<|role_sep|>\n"),
)
INTERNLM = ToolForm(
    name="internlm",
    families="InternLM 2.5 and 3",
    taught=(r"<\|plugin\|>",),
    sections=(Section("<|action_start|><|plugin|>", "<|action_end|>"),),
    notations=(JsonCalls(arguments="parameters"),),
    layout=Layout(begin="<|action_start|><|plugin|>\n", end="\n<|action_end|>", between="\n"),
)
LONGCAT = ToolForm(
    name="longcat",
    families="LongCat-Flash",
    taught=("<longcat_tool_call>",),
    sections=(Section("<longcat_tool_call>", "</longcat_tool_call>"),),
    notations=(_JSON,),
    layout=Layout(begin="<longcat_tool_call>\n", end="\n</longcat_tool_call>", between="\n"),
)
PHI4_MINI_JSON = ToolForm(
    name="phi4_mini_json",
    families="Phi-4 mini",
    taught=(r"functools|<\|/tool(_call)?\|>",),
    sections=(Section("functools"), Section("<|tool_call|>", "<|/tool_call|>")),
    notations=(_JSON,),
    layout=Layout(before="functools[", between=", ", after="]"),
)
GRANITE = ToolForm(
    name="granite",
    families="Granite 3",
    taught=(r"<\|tool_call\|>",),
    sections=(Section("<|tool_call|>"), _TAG),
    notations=(_JSON,),
    layout=Layout(before="<|tool_call|>[", between=", ", after="]"),
)
GRANITE_20B_FC = ToolForm(
    name="granite-20b-fc",
    families="Granite 20B function calling",
    taught=("<function_call>",),
    sections=(Section("<function_call>"),),
    notations=(_JSON,),
    layout=Layout(begin="<function_call> ", between="\n"),
)
HERMES = ToolForm(
    name="hermes",
    families="Hermes 2 and 3, Qwen 2.5, QwQ, Qwen 3, Granite 4, EXAONE 4, ERNIE 4.5",
    taught=("<tool_call>",),
    sections=(_TAG,),
    notations=(_JSON,),
    layout=_TAG_LINES,
    aliases=("qwen25", "granite4", "ernie45"),
)
MINIMAX = ToolForm(
    name="minimax",
    families="MiniMax M1, Jamba, Hunyuan A13B",
    taught=("<tool_calls>",),
    sections=(Section("<tool_calls>", "</tool_calls>"),),
    notations=(_JSON,),
    layout=Layout(before="<tool_calls>\n", end="\n", after="</tool_calls>"),
    aliases=("jamba", "hunyuan_a13b"),
)
