"""Small templates with the structures of model families: what each takes, drops and refuses."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.runtime.text.conversation_form import Absent, Arguments, Calls, Ids, Systems, Tools
from llmc.runtime.text.tool_text import CallBody, CallStyle

_TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
# Users and the assistant in turn, as in Llama 2 and Mistral 0.1.
_ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
)
_CALL_JSON = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"

FAMILIES: Mapping[str, str] = {
    "chatml": _TURNS,
    "hermes": _TOOLS + "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}" + _CALL_JSON + "{% endfor %}",
    # DeepSeek R1: arguments joined to text, calls only where the content is null, one system message.
    "deepseek-r1": (
        "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
        "{% endif %}{% endfor %}{{ ns.s }}{% for m in messages %}"
        "{% if m.role == 'user' %}<user>{{ m.content }}{% endif %}"
        "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}<call>"
        "{{ c.function.name + '\n' + c.function.arguments }}</call>{% endfor %}{% endif %}"
        "{% if m.role == 'assistant' and m.content is not none %}<assistant>{{ m.content }}</s>{% endif %}"
        "{% if m.role == 'tool' %}<output>{{ m.content }}{% endif %}{% endfor %}<assistant>"
    ),
    # Mistral v3: ids of nine characters, text beside calls is dropped, turns alternate, the system with the last user.
    "mistral-v3": (
        "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set loop_messages = messages[1:] %}"
        "{% else %}{% set loop_messages = messages %}{% endif %}{% set ns = namespace(i=0) %}"
        "{% for m in loop_messages if m.role in ['user', 'assistant'] and not m.tool_calls %}"
        "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
        "{% set ns.i = ns.i + 1 %}{% endfor %}"
        "{% set last = loop_messages | selectattr('role', 'equalto', 'user') | list | last %}"
        "{% for m in loop_messages %}{% if m.role == 'user' %}"
        "{% if tools and m == last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "[INST]{% if s is defined and m == last %}{{ s }}\n{% endif %}{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}"
        "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
        "{{ c.function | tojson }}{{ c.id }}{% endfor %}</s>"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}{{ m.tool_call_id }}[/TOOL_RESULTS]"
        "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
    ),
    # Llama 3.1: one call a message, its text is dropped, results as JSON.
    "llama-3.1": (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
        '{"name": "{{ m.tool_calls[0].function.name }}", '
        '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
        "{% elif m.role == 'tool' %}<|ipython|>{{ m.content | tojson }}{% else %}<|{{ m.role }}|>{{ m.content | trim }}"
        "{% endif %}<|eot|>{% endfor %}<|assistant|>"
    ),
    # Gemma 1 and 2: no system, no tools, turns alternate.
    "gemma-2": (
        "{{ '' + bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + _ALTERNATE
        + "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}</turn>"
        "{% endfor %}<turn>model\n"
    ),
    # Qwen3-Coder: arguments one by one, as Python writes them unless they are texts or objects; no later system.
    "qwen3-coder": (
        _TOOLS + "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('first') }}{% endif %}<|{{ m.role }}|>{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
        "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>"
        "{{ v | tojson if v is mapping else v | string }}</parameter>{% endfor %}</function>{% endfor %}{% endfor %}"
    ),
    # GLM 4.5: arguments one by one, as JSON unless they are texts.
    "glm-4.5": (
        _TOOLS + "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}{% endfor %}"
    ),
    # Gemma 4: arguments one by one in a form of its own, null as Python writes it.
    "gemma-4": (
        _TOOLS + "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "<call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}{{ k }}:"
        "{{ '<q>' + v + '<q>' if v is string else 'true' if v is sameas true else v }},{% endfor %}</call>{% endfor %}"
        "{% endfor %}"
    ),
    # Kimi K2: a call is written by its id alone.
    "kimi-k2": (
        _TOOLS + "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "<|call|>{{ c.id }}<|arguments|>{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}{% endfor %}{% endfor %}"
    ),
    # gpt-oss: the system or the developer first, one call a message, thoughts under another name.
    "gpt-oss": (
        "{% set developer = '' %}{% set loop_messages = messages %}{% if messages[0].role in ['developer', 'system'] %}"
        "{% set developer = messages[0].content %}{% set loop_messages = messages[1:] %}{% endif %}<developer>"
        "{{ developer }}{% for t in tools or [] %}// {{ t.function.description + ': ' + t.function.name }}"
        "({{ t.function.parameters.properties | tojson }}){% endfor %}"
        "{% for m in loop_messages %}{% if m.role == 'assistant' and 'tool_calls' in m %}"
        "{% if m.content and m.thinking %}{{ raise_exception('one of both') }}{% endif %}"
        "<analysis>{{ m.content or m.thinking or '' }}<call>{{ m.tool_calls[0].function.name }}"
        "<json>{{ m.tool_calls[0].function.arguments | tojson }}{% elif m.role == 'assistant' %}<final>{{ m.content }}"
        "{% elif m.role == 'tool' %}<result>{{ m.content | tojson }}"
        "{% elif m.role == 'user' %}<user>{{ m.content }}{% endif %}{% endfor %}<assistant>"
    ),
    # Idefics 3 and MiniMax-Text: contents are lists of parts.
    "parts": "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{{ p['text'] }}{% endfor %}{% endfor %}",
    # Phi 3: roles that it does not know are left out.
    "phi-3": (
        "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<|{{ m.role }}|>{{ m.content }}"
        "<|end|>{% endif %}{% endfor %}<|assistant|>"
    ),
    # Ministral 3: an answer may not be empty, thoughts are parts of it.
    "ministral-3": (
        _TOOLS + "{% for m in messages %}{% if m.role == 'assistant' and not m.content and not m.tool_calls %}"
        "{{ raise_exception('an answer has content or calls') }}{% endif %}<|{{ m.role }}|>{% if m.content is string %}"
        "{{ m.content }}{% else %}{% for p in m.content or [] %}"
        "{{ p.text if p.type == 'text' else '[THINK]' + p.thinking + '[/THINK]' }}{% endfor %}{% endif %}"
        + _CALL_JSON
        + "{% endfor %}"
    ),
    # Hermes' tool_use: there are always tools, and each has all of its fields.
    "tool-use": (
        "<tools>{% for t in tools %}{{ t.function.name + ': ' + t.function.description }}"
        "{{ t.function.parameters.properties | tojson }}{% endfor %}</tools>"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + _CALL_JSON + "{% endfor %}"
    ),
    # Tools as functions alone.
    "functions": (
        "{% for t in tools or [] %}{{ t['name'] }}: {{ t['description'] }} {{ t['parameters'] | tojson }}{% endfor %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}" + _CALL_JSON + "{% endfor %}"
    ),
    # SmolLM 3: tools by another name, calls in the content.
    "smollm-3": (
        "{% for t in xml_tools or [] %}{{ t | string }}{% endfor %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    ),
    # Granite 3: teaches a form of calls, and takes them in the content.
    "granite-3": (
        "{% if tools %}Answer with <|tool_call|> and a list. {{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    ),
    # DeepSeek V3: writes calls, and has no place for tools.
    "deepseek-v3": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "<call>{{ c.function.name }}<sep>{{ c.function.arguments }}</call>{% endfor %}</s>{% endfor %}<|assistant|>"
    ),
}

_NO_TOOLS: Mapping[str, object] = {"tools": Tools.DESCRIBED, "calls": Calls.AS_TEXT}
# The fields of each family's form that are not the defaults.
FORMS: Mapping[str, Mapping[str, object]] = {
    "chatml": _NO_TOOLS,
    "hermes": {},
    "deepseek-r1": {
        "systems": Systems.FIRST,
        "tools": Tools.DESCRIBED,
        "call_example": '<call>NAME\n{"ARGUMENT": "VALUE"}</call>',
        "calls_with_text": False,
        "arguments": Arguments.TEXT,
        "absent": Absent.NULL,
    },
    "mistral-v3": {"alternates": True, "systems": Systems.FIRST, "calls_with_text": False, "ids": Ids.SHORT},
    "llama-3.1": {"calls": Calls.ONE_EACH, "calls_with_text": False},
    "gemma-2": {**_NO_TOOLS, "alternates": True, "systems": Systems.IN_USER, "results": False},
    "qwen3-coder": {"systems": Systems.FIRST, "arguments": Arguments.TEXTS, "raw_arguments": False},
    "glm-4.5": {"raw_arguments": False},
    "gemma-4": {"arguments": Arguments.WITHOUT_NULL, "raw_arguments": False},
    "kimi-k2": {"ids": Ids.NAMED},
    "gpt-oss": {
        "systems": Systems.FIRST,
        "fills_tools": True,
        "calls": Calls.ONE_EACH,
        "thought": "thinking",
        "thought_with_text": False,
    },
    "parts": {**_NO_TOOLS, "parts": frozenset({"user", "assistant", "system", "tool"})},
    "phi-3": {**_NO_TOOLS, "results": False},
    "ministral-3": {"blanks": False, "thought": "parts"},
    "tool-use": {"lists_no_tools": True, "fills_tools": True},
    "functions": {"tools": Tools.FUNCTIONS, "fills_tools": True},
    "smollm-3": {"tools_name": "xml_tools", "calls": Calls.AS_TEXT},
    "granite-3": {
        "calls": Calls.AS_TEXT,
        "call_style": CallStyle("<|tool_call|>", "", CallBody.LIST),
    },
    "deepseek-v3": {
        "tools": Tools.DESCRIBED,
        "call_example": '<call>NAME<sep>{"ARGUMENT": "VALUE"}</call>',
        "arguments": Arguments.TEXT,
    },
}
