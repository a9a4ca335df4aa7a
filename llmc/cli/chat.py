"""`llmc chat`: a conversation with an engine in the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from llmc.cli.conversation import Conversation, WhenFull, sampling
from llmc.cli.conversation_prompt import TEMPLATE_HELP, check_template, conversation_prompt
from llmc.cli.engine_options import EngineOptions
from llmc.cli.model_argument import model_argument
from llmc.cli.opening_options import OpeningOptions
from llmc.cli.sampling_options import TokenOptions, number
from llmc.errors import LlmcError, OptionError
from llmc.plural import counted

COMMANDS = {
    "/help": "this list",
    "/clear": "forget the conversation",
    "/system TEXT": "set the system message; without a text, remove it",
    "/retry": "answer the last message again",
    "/undo": "take back the last message and its answer",
    "/history": "show the conversation",
    "/tokens": "how long the conversation is",
    "/set NAME VALUE": "a sampling parameter, such as temperature 0.7",
    "/save FILE": "write the conversation as JSON",
    "/exit": "leave (also Ctrl-D)",
}


def chat(
    model: Annotated[Path, model_argument("engine directory, or a model, whose engine is built once and cached")],
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    chat_template: Annotated[str | None, typer.Option(help=TEMPLATE_HELP)] = None,
    max_tokens: Annotated[int, typer.Option(help="maximum tokens of an answer")] = 512,
    temperature: Annotated[float, number("temperature")] = 0.7,
    top_p: Annotated[float, number("top_p")] = 0.95,
    seed: Annotated[int | None, number("seed")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="for a model directory: maximum tokens of a conversation")
    ] = None,
    when_full: Annotated[
        WhenFull,
        typer.Option(help="when the context is full: drop the oldest messages, summarize them, or stop with an error"),
    ] = WhenFull.SHIFT,
    *,
    tokens: TokenOptions,
    opening: OpeningOptions,
    built: EngineOptions,
) -> None:
    """Chat with a model in the terminal. /help lists the commands."""
    settings = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, **tokens.values()}
    if seed is not None:
        settings["seed"] = seed
    sampling(settings, max_tokens, ())
    check_template(chat_template)
    opening.check()
    path = built.engine(model, longest=max_model_len)
    console = Console(highlight=False)
    with opening.open(path, built.kv_compression) as opened:
        prompt = conversation_prompt(opened, chat_template)
        if prompt.is_plain:
            console.print("[yellow]the model has no chat template: it is shown a plain transcript[/]")
        console.print(
            f"[bold]{opened.info.name}[/], {counted(opened.limits.max_model_len, 'token')}  [dim]/help, /exit[/]"
        )
        talk(Conversation(prompt, settings, system, when_full), console)


def talk(conversation: Conversation, console: Console) -> None:
    """Read lines until /exit, the end of input, or Ctrl-C at an empty prompt; Ctrl-C in an answer only ends that."""
    _line_editing()
    while True:
        try:
            line = _read_line(console)
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line in ("/exit", "/quit", "/bye"):
            return
        try:
            if line.startswith("/"):
                _command(line, conversation, console)
            elif line:
                conversation.turns.append({"role": "user", "content": line})
                _answer(conversation, console)
        except LlmcError as error:
            console.print(f"[red]{error.problem}[/]" + (f"  [dim]{error.fix}[/]" if error.fix else ""))
            if conversation.turns and conversation.turns[-1]["role"] == "user":
                conversation.forget(len(conversation.turns) - 1)


def _read_line(console: Console) -> str:
    """Read one line of input; a backslash at its end continues it on the next line."""
    lines = [console.input("[bold cyan]>[/] ") if sys.stdin.isatty() else input()]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(console.input("[bold cyan]…[/] ") if sys.stdin.isatty() else input())
    return "\n".join(lines).strip()


def _answer(conversation: Conversation, console: Console) -> None:
    notice = conversation.make_room()
    if notice is not None:
        console.print(f"[dim]({notice})[/]")
    text, tokens, reason = "", 0, None
    try:
        for piece in conversation.answer():
            console.out(piece.text if text.strip() else piece.text.lstrip(), end="", highlight=False)
            text, tokens, reason = text + piece.text, piece.tokens, piece.finish_reason
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/]", end="")
    console.print()
    if reason == "length":
        console.print(f"[dim]({_cut(conversation, tokens)})[/]")
    conversation.turns.append({"role": "assistant", "content": text.strip()})


def _cut(conversation: Conversation, tokens: int) -> str:
    """Return why an answer ended after this number of tokens."""
    if tokens >= int(conversation.settings["max_tokens"]):
        return f"cut after {tokens} tokens: /set max_tokens {2 * tokens} allows more"
    return f"cut after {tokens} tokens: the conversation fills the model's {conversation.limit}"


def _command(line: str, conversation: Conversation, console: Console) -> None:
    name, _, rest = line.partition(" ")
    turns = conversation.turns
    if name == "/help":
        for command, description in COMMANDS.items():
            console.print(f"  [bold]{command:<16}[/] {description}")
    elif name == "/clear":
        conversation.forget(0)
    elif name == "/system":
        conversation.system = rest.strip() or None
    elif name in ("/retry", "/undo"):
        while turns and turns[-1]["role"] == "assistant":
            conversation.forget(len(turns) - 1)
        if name == "/undo" and turns:
            conversation.forget(len(turns) - 1)
        elif name == "/retry" and turns:
            _answer(conversation, console)
    elif name == "/history":
        for message in conversation.messages():
            console.print(f"[bold]{message['role']}[/]", end=" ")
            console.print(message["content"], markup=False)
        if conversation.first:
            console.print(f"[dim](the model is shown none of the first {conversation.first} messages)[/]")
    elif name == "/tokens":
        console.print(f"{conversation.tokens(conversation.shown())} of {counted(conversation.limit, 'token')}")
    elif name == "/set":
        _set(rest.split(), conversation.settings, console)
    elif name == "/save":
        _save(rest.strip(), conversation)
    else:
        raise OptionError(f"unknown command {name}", fix="/help lists them")


def _set(words: list[str], settings: dict[str, Any], console: Console) -> None:
    if len(words) == 2:
        try:
            changed = {**settings, words[0]: int(words[1]) if words[1].lstrip("-").isdigit() else float(words[1])}
        except ValueError:
            raise OptionError(f"{words[1]!r} is not a number", fix="/set temperature 0.7") from None
        sampling(changed, 1 << 30, ())
        settings.update(changed)
    console.print("  ".join(f"{name}={value}" for name, value in settings.items()), markup=False)


def _save(name: str, conversation: Conversation) -> None:
    try:
        Path(name).write_text(json.dumps(conversation.messages(), indent=1, ensure_ascii=False) + "\n", "utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {name!r}: {error.strerror}", fix="/save FILE") from None


def _line_editing() -> None:
    """History and arrow keys where Python was built with readline."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
