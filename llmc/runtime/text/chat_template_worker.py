"""The process in which chat templates run: limits on itself first, then one question and one answer a line."""

from __future__ import annotations

import json
import os
import resource
import sys
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.processes.lifeline import end_with
from llmc.runtime.text.normal_messages import normal_messages
from llmc.runtime.text.template_program import NotShownError, Question, TemplateProgram

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

    from jinja2 import Environment

    # By a template's text, and the special tokens as JSON.
    Programs = _lru_cache_wrapper[TemplateProgram]

# Size limits of a model's templates, and of those in requests.
_PROGRAMS = 8


def main() -> None:
    """Arguments: bytes of memory beyond what Python takes, characters of the longest prompt, the niceness, the
    lifeline."""
    memory_bytes, most_characters, niceness, lifeline = map(int, sys.argv[1:])
    end_with(lifeline)
    os.nice(niceness)
    environment = template_environment()

    @lru_cache(maxsize=_PROGRAMS)
    def program(source: str, special_tokens: str) -> TemplateProgram:
        return TemplateProgram(environment, source, json.loads(special_tokens), most_characters)

    limit_resources(memory_bytes)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(program, json.loads(line))), flush=True)


def limit_resources(memory_bytes: int) -> None:
    """Allow at most that much more memory, no written file, and no core dump."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def template_environment() -> Environment:
    """Jinja's sandbox with the extensions that Hugging Face templates expect (transformers'
    `_compile_jinja_template`)."""
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


def answer(program: Programs, question: dict[str, Any]) -> dict[str, Any]:
    """Answer the engine's question about its templates, as a JSON object.

    Args:
        program: Compiles a template's source.
        question: The sources, the conversation with its tools and variables, or no conversation.

    Returns:
        `prompt` and `warnings` for a conversation; without one, `lacks` and `describes_tools` of each template. If the
        template fails, `error`: the reason in one line.
    """
    programs = [program(source, question["special_tokens"]) for source in question["sources"]]
    try:
        if question["messages"] is None:
            return {
                "lacks": [list(member.fit.lacks) for member in programs],
                "describes_tools": [member.describes_tools for member in programs],
            }
        messages = normal_messages(question["messages"])
        conversation = Question(
            messages, question["tools"], question["variables"], question["continue"], question["call_example"]
        )
        chosen = next((member for member in programs if member.has_place_for(conversation)), programs[0])
        return {"prompt": chosen.prompt(conversation), "warnings": chosen.warnings(conversation)}
    except MemoryError:
        program.cache_clear()
        return {"error": "fails: it needs too much memory"}
    except RecursionError:
        return {"error": "fails: it recurses too deeply"}
    except NotShownError as error:
        return {"error": str(error)}
    except Exception as error:  # A template can raise anything: it is the user's program.
        return {"error": "fails: " + " ".join(f"{error or type(error).__name__}".split())[:300]}


if __name__ == "__main__":
    main()
