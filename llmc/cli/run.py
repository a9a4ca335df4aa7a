"""`llmc run`: text from an engine, or from a model directory whose engine is built first."""

from __future__ import annotations

import json as json_text
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from llmc.cli.conversation_prompt import TEMPLATE_HELP, ConversationPrompt, check_template, conversation_prompt
from llmc.cli.draft_rows import drafts_of
from llmc.cli.engine_options import EngineOptions
from llmc.cli.model_argument import model_argument
from llmc.cli.opening_options import OpeningOptions
from llmc.cli.sampling_options import SamplingOptions
from llmc.errors import LlmcError, OptionError
from llmc.plural import counted

if TYPE_CHECKING:
    from llmc.runtime.engine import Engine
    from llmc.runtime.requests.completion import Completion
    from llmc.runtime.sampling.sampling_params import SamplingParams


def run(
    model: Annotated[Path, model_argument("engine directory, or a model, whose engine is built once and cached")],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="text to continue (repeatable)")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="file with the prompt; - is standard input")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="prompts are messages, answered by the model's chat template")
    ] = False,
    system: Annotated[str | None, typer.Option(help="system message, with --chat")] = None,
    chat_template: Annotated[str | None, typer.Option(help=f"{TEMPLATE_HELP}; with --chat")] = None,
    json: Annotated[bool, typer.Option("--json", help="print each completion as a JSON object, one per line")] = False,
    max_model_len: Annotated[
        int | None, typer.Option(help="for a model directory: maximum tokens of prompt and output together")
    ] = None,
    lora: Annotated[str | None, typer.Option(help="LoRA adapter to apply at run time", metavar="NAME=DIR")] = None,
    *,
    sampling: SamplingOptions,
    opening: OpeningOptions,
    built: EngineOptions,
) -> None:
    """Generate text for one or several prompts, or with --chat answer them. Text is printed as it is generated."""
    params = sampling.params()
    if not chat and (system is not None or chat_template is not None):
        at = "--system" if system is not None else "--chat-template"
        raise OptionError(f"{at} applies to conversations only", at=at, fix="add --chat")
    check_template(chat_template)
    opening.check()
    prompts = read_prompts(prompt, prompt_file)
    path = built.engine(model, longest=max_model_len, **built_for(lora))
    start = time.perf_counter()
    with opening.open(path, built.kv_compression) as engine:
        adapter = None if lora is None else load_adapter(engine, lora)
        loaded = time.perf_counter()
        if chat:
            tokens = answer(conversation_prompt(engine, chat_template), prompts, system, params, json, adapter)
        else:
            tokens = complete(engine, prompts, params, json, adapter)
        seconds = time.perf_counter() - loaded
        drafts = acceptance(engine)
    Console(stderr=True).print(
        f"[dim]loaded in {loaded - start:.2f} s; {counted(tokens, 'token')} in {seconds:.2f} s "
        f"({tokens / seconds:.0f} tok/s)"
        f"{drafts}[/]"
    )


def acceptance(engine: Engine) -> str:
    """The acceptance of drafts, as a suffix to other figures; empty without speculation."""
    counts = drafts_of(engine)
    if counts is None:
        return ""
    if not counts.drafts:
        return "; nothing was drafted"
    accepted = f"{counts.acceptance:.0%} of {counts.draft_tokens} drafts accepted"
    return f"; {accepted}, {counts.tokens_a_step:.2f} tokens per step with drafts"


def read_prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    """The prompts of the options, or of standard input if it is piped."""
    if file is not None:
        try:
            text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
            return [*(prompts or ()), text]
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"cannot read the prompt: {error}", at=file, fix="name a UTF-8 text file") from None
    if prompts:
        return prompts
    if not sys.stdin.isatty() and (text := sys.stdin.read()):
        return [text]
    raise OptionError("no prompt was given", at="llmc run", fix='give one: --prompt "Once upon a time"')


def complete(engine: Engine, prompts: list[str], params: SamplingParams, json: bool, adapter: str | None) -> int:
    """Print each prompt with its continuation, a single one as it comes; returns the tokens generated."""
    if len(prompts) == 1 and not json:
        return stream_one(engine, prompts[0], prompts[0], params, adapter)
    return print_all(engine.generate(prompts, params, adapter=adapter), prompts, prompts, json)


def answer(
    conversation: ConversationPrompt,
    prompts: list[str],
    system: str | None,
    params: SamplingParams,
    json: bool,
    adapter: str | None,
) -> int:
    """Print the answer to each message, a single one as it comes; returns the tokens generated."""
    if conversation.is_plain:
        Console(stderr=True).print("[yellow]the model has no chat template: it is shown a plain transcript[/]")
    engine = conversation.engine
    before = [] if system is None else [{"role": "system", "content": system}]
    ids = [conversation.token_ids([*before, {"role": "user", "content": prompt}]) for prompt in prompts]
    params = replace(params, stop=(*params.stop, *conversation.stops()))
    if len(prompts) == 1 and not json:
        return stream_one(engine, ids[0], "", params, adapter)
    return print_all(engine.generate(ids, params, adapter=adapter), prompts, [""] * len(ids), json)


def stream_one(
    engine: Engine, prompt: str | list[int], shown: str, params: SamplingParams, adapter: str | None = None
) -> int:
    """Print what is shown of the prompt, and the text as it comes; nothing if there is none; returns the tokens."""
    tokens = 0
    try:
        for piece in engine.stream(prompt, params, adapter=adapter):
            sys.stdout.write(shown + piece.text)
            sys.stdout.flush()
            shown, tokens = "", piece.tokens
    except (LlmcError, KeyboardInterrupt):
        if tokens:  # Messages about it start on a new line.
            sys.stdout.write("\n")
            sys.stdout.flush()
        raise
    sys.stdout.write(shown + "\n")
    return tokens


def print_all(completions: Sequence[Completion], prompts: list[str], shown: list[str], json: bool) -> int:
    """Print each completion, as text after the shown part of its prompt or as JSON. Returns the number of generated
    tokens."""
    for prompt, head, completion in zip(prompts, shown, completions, strict=True):
        if json:
            sys.stdout.write(json_text.dumps(completion_json(prompt, completion), ensure_ascii=False) + "\n")
        else:
            sys.stdout.write(f"{head}{completion.text}\n\n")
    return sum(len(completion.token_ids) for completion in completions)


def completion_json(prompt: str, completion: Completion) -> dict[str, Any]:
    """A completion as JSON for other programs."""
    return {
        "prompt": prompt,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.choices[0].stop_reason,
        "token_ids": list(completion.token_ids),
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": completion.cached_tokens,
    }


def built_for(lora: str | None) -> dict[str, Any]:
    """The build options with which a model directory's engine accepts this adapter. Raises AdapterError."""
    if lora is None:
        return {}
    from llmc.adapters.adapter import read_adapter
    from llmc.options import BuildOptions

    _, directory = named(lora)
    ranks = [module.rank for module in read_adapter(directory).modules.values()]
    return {"enable_lora": True, "max_lora_rank": max([BuildOptions().max_lora_rank, *ranks])}


def load_adapter(engine: Engine, lora: str) -> str:
    """Load it, and return its name. Raises AdapterError."""
    name, directory = named(lora)
    engine.load_adapter(name, directory)
    return name


def named(lora: str) -> tuple[str, str]:
    """Name and directory. Raises OptionError."""
    name, _, directory = lora.partition("=")
    if not name.strip() or not directory.strip():
        raise OptionError(
            f"{lora!r:.80} is not NAME=DIR", at=f"--lora {lora}", fix="such as --lora style=adapters/style"
        )
    return name, directory
