"""Verbs of other tools that llmc does not have, and their equivalents."""

from llmc.errors import OptionError

# The verbs of Ollama, vLLM, llama.cpp, docker and huggingface-cli.
_INSTEAD = {
    "list": "`llmc cache --entries` lists cached engines; an engine that you built is a directory",
    "ls": "`llmc cache --entries` lists cached engines; an engine that you built is a directory",
    "pull": "give the name to `llmc build`, `run` or `serve`: a model of the hub is downloaded at its first use",
    "download": "give the name to `llmc build`, `run` or `serve`: a model of the hub is downloaded at its first use",
    "ps": "a server answers on GET /health, /metrics and /v1/models, and shows its load on the page at /",
    "stop": "end the server with SIGTERM or Ctrl-C: it finishes the requests in flight",
    "rm": "`llmc cache clear` clears the cache; an engine that you built is a directory, which you can delete",
    "show": "`llmc inspect ENGINE`",
    "create": "`llmc build MODEL -o ENGINE`",
    "compile": "`llmc build MODEL -o ENGINE`",
    "convert": "`llmc build MODEL -o ENGINE` reads directories, .gguf and .onnx files as they are",
    "quantize": "`llmc build MODEL --quantize int4 -o ENGINE`",
    "generate": "`llmc run ENGINE --prompt TEXT`",
    "complete": "`llmc run ENGINE --prompt TEXT`",
    "perplexity": "`llmc verify ENGINE --against MODEL --perplexity TEXT`",
}


def refuse_other_verb(verb: str | None) -> None:
    """Raise OptionError for a verb of another tool, and name what to use instead. None: no verb was given."""
    if verb in _INSTEAD:
        raise OptionError(f"llmc has no verb {verb!r}", at=f"llmc {verb}", fix=_INSTEAD[verb])
