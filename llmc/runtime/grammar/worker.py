"""The process in which grammars are tried: limits on itself first, then one question and one answer a line.

Each grammar is tried in a child that the kernel ends when its time is over, so that a grammar bomb does not end the
worker, whose vocabulary takes up to a second to load.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from llmc.errors import LlmcError
from llmc.processes.lifeline import end_with
from llmc.runtime.grammar.beginning import check_beginning
from llmc.runtime.grammar.grammar import Grammar, GrammarKind, grammar_of_json
from llmc.runtime.grammar.inner_schemas import with_served_schemas
from llmc.runtime.grammar.json_schema import notes_of_warnings, served_schema
from llmc.runtime.grammar.limits import refusal
from llmc.runtime.grammar.matcher import grammar_tokenizer, matcher_grammar, new_matcher, schema_fault
from llmc.runtime.grammar.optional_properties import check_optional_properties

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def main() -> None:
    """Arguments: tokenizer.json, vocabulary size, end-of-text ids with commas, bytes of memory beyond Python's, the
    lifeline."""
    path, vocab_size, eos, memory_bytes, lifeline = sys.argv[1:]
    end_with(int(lifeline))
    tokenizer = grammar_tokenizer(Path(path), int(vocab_size), tuple(map(int, filter(None, eos.split(",")))))
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + int(memory_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(in_child(json.loads(line), tokenizer, int(vocab_size))), flush=True)


def in_child(question: dict[str, Any], tokenizer: LLTokenizer, vocab_size: int) -> dict[str, Any]:
    """The answer of a child: grammar or error, late if it had not ended in time, lost if it ended without an answer."""
    reading, writing = os.pipe()
    child = os.fork()  # This process has one thread.
    if child == 0:
        _answer_and_end(question, tokenizer, vocab_size, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status == 0:
        answer: dict[str, Any] = json.loads(text)
        return answer
    is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
    return {"late" if is_late else "lost": True}


def _answer_and_end(question: dict[str, Any], tokenizer: LLTokenizer, vocab_size: int, writing: int) -> NoReturn:
    code = 1
    try:
        # Without a handler the signal ends the process wherever it is, in llguidance's code too.
        signal.setitimer(signal.ITIMER_REAL, question["seconds"])
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(answer_to(question, tokenizer, vocab_size)).encode())
        code = 0
    finally:
        os._exit(code)


def answer_to(question: dict[str, Any], tokenizer: LLTokenizer, vocab_size: int) -> dict[str, Any]:
    """The grammar in llguidance's notation, with notes on what is left out of it, or the error that it is."""
    try:
        grammar, notes = _served(grammar_of_json(question), tokenizer)
        text = matcher_grammar(grammar)
        matcher = new_matcher(tokenizer, text)
        check_beginning(matcher, tokenizer, vocab_size)
    except LlmcError as error:
        return {"error": error.problem, "fix": error.fix or ""}
    except (MemoryError, RecursionError) as error:
        return {"error": f"it is too large ({type(error).__name__})"}
    return {"grammar": text, "notes": [*notes, *notes_of_warnings(matcher.get_grammar_warnings())]}


def _served(grammar: Grammar, tokenizer: LLTokenizer) -> tuple[Grammar, list[str]]:
    """The grammar with its schemas as they are served, with notes. Raises RequestError."""
    notes: dict[str, None] = {}

    def serve(schema: str) -> str:
        served, more = served_schema(schema, partial(schema_fault, tokenizer))
        check_optional_properties(json.loads(served), tokenizer)
        notes.update(dict.fromkeys(more))
        return served

    source, instead = grammar.source, grammar.instead
    try:
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            source = serve(source)
        elif grammar.kind is GrammarKind.EBNF:
            source = with_served_schemas(source, serve)
        instead = None if instead is None else with_served_schemas(instead, serve)
    except ValueError as error:
        raise refusal(str(error)) from None
    return Grammar(grammar.kind, source, grammar.preamble, instead), list(notes)


if __name__ == "__main__":
    main()
