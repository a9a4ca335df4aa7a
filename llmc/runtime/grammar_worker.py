"""The process in which grammars are tried: limits on itself first, then one question and one answer a line."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from llmc.errors import LlmcError
from llmc.runtime.grammar import Grammar, GrammarKind
from llmc.runtime.grammar_matcher import grammar_tokenizer, matcher_grammar, new_matcher, start_mask


def main() -> None:
    """Arguments: tokenizer.json, vocabulary size, end-of-text ids with commas, bytes of memory beyond Python's."""
    path, vocab_size, eos, memory_bytes = sys.argv[1:]
    tokenizer = grammar_tokenizer(Path(path), int(vocab_size), tuple(map(int, filter(None, eos.split(",")))))
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + int(memory_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            text = matcher_grammar(Grammar(GrammarKind(question["kind"]), question["source"]))
            start_mask(new_matcher(tokenizer, text), int(vocab_size))
            answer = {"grammar": text}
        except LlmcError as error:
            answer = {"error": error.problem}
        except (MemoryError, RecursionError) as error:
            answer = {"error": f"it is too large ({type(error).__name__})"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
