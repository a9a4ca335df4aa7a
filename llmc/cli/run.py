"""`llmc run`: text from an engine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from llmc.errors import OptionError

if TYPE_CHECKING:
    from llmc.runtime.engine import Engine
    from llmc.runtime.sampling_params import SamplingParams


def run(
    engine: Annotated[Path, typer.Argument(help="engine directory")],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="text to continue (repeatable)")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="a file whose text is the prompt")] = None,
    max_tokens: Annotated[int, typer.Option(help="tokens to generate")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="sample from the k likeliest")] = None,
    top_p: Annotated[float, typer.Option(help="sample from the smallest set with this probability")] = 1.0,
    min_p: Annotated[float, typer.Option(help="drop tokens below this share of the likeliest's probability")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="divides the logits of tokens seen before")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="taken once from tokens generated before")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="taken per occurrence from tokens generated before")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="of the sampling")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text (repeatable)")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on after the end-of-text token")] = False,
    threads: Annotated[int | None, typer.Option(help="default: every core that this process may use")] = None,
) -> None:
    """Continue one or several prompts."""
    from llmc.runtime.engine import load
    from llmc.runtime.sampling_params import SamplingParams

    prompts = read_prompts(prompt, prompt_file)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    start = time.perf_counter()
    with load(engine, threads=threads) as opened:
        loaded = time.perf_counter()
        tokens = stream_one(opened, prompts[0], params) if len(prompts) == 1 else print_all(opened, prompts, params)
        seconds = time.perf_counter() - loaded
    Console(stderr=True).print(
        f"[dim]loaded in {loaded - start:.2f} s; {tokens} tokens in {seconds:.2f} s ({tokens / seconds:.0f} tok/s)[/]"
    )


def read_prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    """The prompts of the options, or of standard input if it is piped."""
    if file is not None:
        try:
            return [*(prompts or ()), file.read_text(encoding="utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"cannot read the prompt: {error}", at=file, fix="name a UTF-8 text file") from None
    if prompts:
        return prompts
    if not sys.stdin.isatty() and (text := sys.stdin.read()):
        return [text]
    raise OptionError("no prompt was given", at="llmc run", fix='give one: --prompt "Once upon a time"')


def stream_one(engine: Engine, prompt: str, params: SamplingParams) -> int:
    """Print the prompt and its continuation as it comes; returns the tokens generated."""
    tokens = 0
    pieces = engine.stream(prompt, params)
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece.text)
        sys.stdout.flush()
        tokens = piece.tokens
    sys.stdout.write("\n")
    return tokens


def print_all(engine: Engine, prompts: list[str], params: SamplingParams) -> int:
    """Generate for all prompts in one batch, print each; returns the tokens generated."""
    completions = engine.generate(prompts, params)
    for prompt, completion in zip(prompts, completions, strict=True):
        sys.stdout.write(f"{prompt}{completion.text}\n\n")
    return sum(len(completion.token_ids) for completion in completions)
