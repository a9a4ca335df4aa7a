"""The process in which chat templates run: limits on itself first, then one question and one answer a line."""

from __future__ import annotations

import json
import os
import resource
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.processes.lifeline import end_with

if TYPE_CHECKING:
    from jinja2 import Environment


def main() -> None:
    """Arguments: bytes of memory beyond what Python takes, bytes of the longest prompt, the niceness, the lifeline."""
    memory_bytes, output_bytes, niceness, lifeline = map(int, sys.argv[1:])
    end_with(lifeline)
    os.nice(niceness)
    environment = template_environment()
    limit_resources(memory_bytes)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(environment, json.loads(line), output_bytes)), flush=True)


def limit_resources(memory_bytes: int) -> None:
    """No more than that much more memory, no file written, no core dump."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def template_environment() -> Environment:
    """Jinja's sandbox with what Hugging Face templates expect (transformers' `_compile_jinja_template`)."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's tokens for training; in a prompt it is its content."""

        tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def answer(environment: Environment, question: dict[str, Any], output_bytes: int) -> dict[str, str]:
    """`prompt`, or `error` with one line of why not."""
    try:
        return {"prompt": rendered(environment, question, output_bytes)}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it recurses too deeply"}
    except Exception as error:  # A template can raise anything: it is the user's program.
        return {"error": " ".join(f"{error or type(error).__name__}".split())[:300]}


def rendered(environment: Environment, question: dict[str, Any], output_bytes: int) -> str:
    """The template's output, cut after the last message's content if the model is to go on with it."""
    pieces, size = [], 0
    for piece in environment.from_string(question["template"]).generate(**question["variables"]):
        pieces.append(piece)
        size += len(piece)
        if size > output_bytes:
            raise ValueError(f"the prompt is longer than {output_bytes} characters")
    prompt = "".join(pieces)
    return after_last_message(prompt, question["variables"]["messages"]) if question["continue"] else prompt


def after_last_message(prompt: str, messages: list[dict[str, Any]]) -> str:
    """The prompt up to the end of the last message's content."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str) or not content.strip():
        raise ValueError("continue_final_message needs a last message with text")
    at = prompt.rfind(content.strip())
    if at < 0:
        raise ValueError("the template does not contain the last message's text as it is")
    return prompt[: at + len(content.strip())]


if __name__ == "__main__":
    main()
