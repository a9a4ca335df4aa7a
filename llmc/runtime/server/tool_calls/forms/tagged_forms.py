"""Forms with a pair of tags around each argument."""

from dataclasses import replace

from llmc.runtime.server.tool_calls.form import Layout, Section, ToolForm
from llmc.runtime.server.tool_calls.json_calls import JsonCalls
from llmc.runtime.server.tool_calls.tagged_calls import TaggedCalls

_JSON = JsonCalls()
_TAG = Section("<tool_call>", "</tool_call>")
_TAG_LINES = Layout(begin="<tool_call>\n", end="\n</tool_call>", between="\n")
_QWEN3_CODER = TaggedCalls(
    opening="<function=",
    name_closing=">\n",
    key_opening="<parameter=",
    key_closing=">\n",
    value_closing="\n</parameter>\n",
    closing="</function>",
    name_ends=(">",),
    ends=("<parameter=", "</function>"),
    padded=True,
)
_INVOKE = TaggedCalls(
    opening='<invoke name="',
    name_closing='">\n',
    key_opening='<parameter name="',
    key_closing='">',
    value_closing="</parameter>\n",
    closing="</invoke>",
    name_ends=('">',),
    ends=("<parameter name=", "</invoke>"),
)
_DSML = TaggedCalls(
    opening='<｜DSML｜invoke name="',
    name_closing='">\n',
    key_opening='<｜DSML｜parameter name="',
    key_closing='" string="false">',
    text_key_closing='" string="true">',
    value_closing="</｜DSML｜parameter>\n",
    closing="</｜DSML｜invoke>",
    name_ends=('">',),
    ends=("<｜DSML｜parameter name=", "</｜DSML｜invoke>"),
)
_GLM = TaggedCalls(
    opening="",
    name_closing="\n",
    key_opening="<arg_key>",
    key_closing="</arg_key>\n",
    value_opening="<arg_value>",
    value_closing="</arg_value>\n",
    closing="",
    name_ends=("\n", "<arg_key>", "</tool_call>"),
    ends=("<arg_key>", "</tool_call>"),
)

DEEPSEEK_V32 = ToolForm(
    name="deepseek_v32",
    families="DeepSeek V3.2",
    taught=("｜DSML｜", "function_calls"),
    sections=(Section("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),),
    notations=(_DSML,),
    layout=Layout(before="<｜DSML｜function_calls>\n", end="\n", after="</｜DSML｜function_calls>"),
)
DEEPSEEK_V4 = ToolForm(
    name="deepseek_v4",
    families="DeepSeek V4",
    taught=("｜DSML｜",),
    sections=(Section("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),),
    notations=(_DSML,),
    layout=Layout(before="<｜DSML｜tool_calls>\n", end="\n", after="</｜DSML｜tool_calls>"),
)
MINIMAX_M2 = ToolForm(
    name="minimax_m2",
    families="MiniMax M2",
    taught=("<minimax:tool_call>",),
    sections=(Section("<minimax:tool_call>", "</minimax:tool_call>"),),
    notations=(_INVOKE,),
    layout=Layout(before="<minimax:tool_call>\n", end="\n", after="</minimax:tool_call>"),
)
SEED_OSS = ToolForm(
    name="seed_oss",
    families="Seed-OSS",
    taught=("<seed:tool_call>",),
    sections=(Section("<seed:tool_call>", "</seed:tool_call>"),),
    notations=(replace(_QWEN3_CODER, key_closing=">", value_closing="</parameter>\n", padded=False),),
    layout=Layout(begin="<seed:tool_call>\n", end="\n</seed:tool_call>", between="\n"),
)
QWEN3_CODER = ToolForm(
    name="qwen3_coder",
    families="Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5",
    taught=("<function=", "<parameter="),
    sections=(_TAG, Section("<function=", is_call=True)),
    notations=(_QWEN3_CODER, _JSON),
    layout=_TAG_LINES,
    aliases=("qwen3_xml", "step3p5"),
)
GLM47 = ToolForm(
    name="glm47",
    families="GLM 4.7, GLM 5",
    taught=("<arg_key>", "</arg_key><arg_value>"),
    sections=(_TAG,),
    notations=(replace(_GLM, name_closing="", key_closing="</arg_key>", value_closing="</arg_value>"),),
    layout=Layout(begin="<tool_call>", end="</tool_call>"),
)
GLM45 = ToolForm(
    name="glm45",
    families="GLM 4.5, GLM 4.6",
    taught=("<arg_key>",),
    sections=(_TAG,),
    notations=(_GLM,),
    layout=Layout(begin="<tool_call>", end="</tool_call>", between="\n"),
)
