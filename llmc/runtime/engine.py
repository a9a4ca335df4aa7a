"""The engine as its users see it: load a directory, generate text, compute logits."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt

from llmc.engine_format import EngineDirectory, Manifest, ModelRecord, read_engine
from llmc.engine_format.copy import copy_engine
from llmc.engine_format.path_argument import path_argument
from llmc.errors import OptionError, RequestError
from llmc.program import Limits
from llmc.runtime.completion import Choice, Completion, Piece
from llmc.runtime.engine_record import explanation, predicted_step, report_file
from llmc.runtime.executors.absent import AbsentExecutor
from llmc.runtime.executors.executor import Executor
from llmc.runtime.executors.opening import ExecutorName, open_or_explain
from llmc.runtime.generation import Generation, Scoring
from llmc.runtime.generation_job import ChoiceResult, GenerationJob
from llmc.runtime.generation_request import GenerationRequest
from llmc.runtime.grammar_compiler import GrammarCompiler
from llmc.runtime.intake import Intake
from llmc.runtime.output_cache import CachedAnswer, OutputCache
from llmc.runtime.output_text import OutputText
from llmc.runtime.prompts import Prompt, Prompts, check_ids, check_length, is_single, token_sequences
from llmc.runtime.prompts import token_ids as ids_of
from llmc.runtime.sampling_params import SamplingParams
from llmc.runtime.step_loop import StepLoop
from llmc.runtime.threads import thread_count
from llmc.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

    from llmc.graph.predict_device import StepPrediction

Logits = npt.NDArray[np.float32]


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    kv_cache_bytes: int | None = None,
    kv_memory: float | None = None,
    max_step_tokens: int | None = None,
    max_sequences: int | None = None,
    prefix_cache: bool = True,
    output_cache_bytes: int = 0,
    check_weights: bool = True,
    executor: ExecutorName | None = None,
    owned: TemporaryDirectory[str] | None = None,
) -> Engine:
    """Open an engine directory.

    executor: what runs the steps; by default what the engine was built for. If this machine cannot run that, the engine
    opens all the same, to be looked at and saved, and its steps raise TargetError; one that is named is there or is an
    error at once. "reference" runs a GPU engine's graph in torch, "triton_interpreter" its kernels, on the CPU.
    threads: of a step; default LLMC_THREADS, else the physical cores available. kv_cache_bytes: default as in
    kv_capacity.block_count; untouched parts of it cost nothing. kv_memory: the same as a share of the free memory (a
    GPU's on a GPU). max_step_tokens, max_sequences: lower limits of a step than the engine was built for.
    prefix_cache: keep the blocks of finished requests for those that begin alike.
    output_cache_bytes: keep the answers to requests without chance (greedy, seeded, beam search). check_weights:
    compare the weights' hashes. owned: a temporary directory to delete when the engine is closed. Raises
    EngineFormatError, TargetError, OptionError.
    """
    directory = read_engine(path_argument("path", path), check_weights=check_weights, check_machine=False)
    limits = directory.program.limits
    _check_limit("max_step_tokens", max_step_tokens, limits.max_batch_tokens, "max_batch_tokens")
    _check_limit("max_sequences", max_sequences, limits.max_sequences, "max_sequences")
    limits = replace(limits, max_sequences=max_sequences or limits.max_sequences)
    is_temporary = owned is not None
    opened, blocks = open_or_explain(
        directory, executor, kv_cache_bytes, kv_memory, thread_count(threads), is_temporary
    )
    loop = StepLoop(opened, limits, blocks, max_step_tokens)
    return Engine(directory, opened, loop, owned, prefix_cache=prefix_cache, output_cache_bytes=output_cache_bytes)


def _check_limit(name: str, value: int | None, most: int, built: str) -> None:
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise OptionError(
            f"{name} cannot be {value!r}",
            at=f"{name}={value!r}",
            fix=f"give a whole number 1 to {most}, the engine's {built}",
        )


class Engine:
    """A loaded engine; made by `llmc.load` or `llmc.compile`. Close it, or use it as a context manager.

    For one thread at a time. Requests that run together share steps; a request's tokens do not depend on the others.
    """

    def __init__(
        self,
        directory: EngineDirectory,
        executor: Executor,
        loop: StepLoop,
        owned: TemporaryDirectory[str] | None = None,
        *,
        prefix_cache: bool = True,
        output_cache_bytes: int = 0,
    ) -> None:
        self._directory = directory
        self._executor = executor
        self._open_loop: StepLoop | None = loop
        self._owned = owned
        self._tokenizer = Tokenizer(directory.path)
        self._intake = Intake(
            directory.manifest.model, directory.program.limits, self._tokenizer, prefix_cache=prefix_cache
        )
        self._grammars = GrammarCompiler(
            self._tokenizer.path, directory.manifest.model.vocab_size, directory.manifest.model.eos_token_ids
        )
        self._output_cache = OutputCache(output_cache_bytes) if output_cache_bytes else None

    @property
    def path(self) -> Path:
        """The engine directory."""
        return self._directory.path

    @property
    def info(self) -> ModelRecord:
        """The model that the engine was built from."""
        return self._directory.manifest.model

    @property
    def manifest(self) -> Manifest:
        """Everything that the engine's manifest says."""
        return self._directory.manifest

    @property
    def limits(self) -> Limits:
        """The longest sequence, and the most tokens, requests and logit rows of a step."""
        return self._directory.program.limits

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer, which may not exist."""
        return self._tokenizer

    @property
    def loop(self) -> StepLoop:
        """The loop, for who drives it step by step. Raises RequestError when the engine is closed, TargetError when
        this machine cannot run it."""
        return self._loop

    @property
    def intake(self) -> Intake:
        """Checks requests and makes their sequences."""
        return self._intake

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars for the engine's vocabulary."""
        return self._grammars

    @property
    def output_cache(self) -> OutputCache | None:
        """Answers that are kept; None if none are."""
        return self._output_cache

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, as a prompt. Raises RequestError if the engine has no tokenizer."""
        if not isinstance(text, str):
            raise RequestError(f"a text cannot be {text!r:.80} ({type(text).__name__})", fix="give a str")
        return self._tokenizer.encode(text)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens; empty if the engine has no tokenizer."""
        ids = ids_of(token_ids, self._tokenizer)
        check_ids("token_ids", ids, self.info.vocab_size)
        return self._tokenizer.decode(ids)

    def generate(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue one prompt or several (texts or lists of token ids), all in the same steps.

        params: for all prompts, or one each; default greedy. Returns one completion a prompt, in order. Raises
        RequestError for a prompt or parameter that this engine cannot serve, before anything is computed.
        """
        sequences = token_sequences(prompts, self._tokenizer)
        each = self._params_for(sequences, params)
        requests = [
            GenerationRequest(prompt_token_ids=tuple(s), params=p, request_id=str(i))
            for i, (s, p) in enumerate(zip(sequences, each, strict=True))
        ]
        cache = self._output_cache
        cached = [None if cache is None else cache.get(request) for request in requests]
        jobs = [None if a else self._job(i, r) for i, (r, a) in enumerate(zip(requests, cached, strict=True))]
        self._run([job for job in jobs if job is not None])
        completions = []
        for index, (request, answer, job) in enumerate(zip(requests, cached, jobs, strict=True)):
            if answer is None:
                assert job is not None
                answer = _answer(job, f"prompt {index}")
                if cache is not None:
                    cache.put(request, answer)
            choices = tuple(self.choice(result, request.params) for result in answer.results)
            found = len(request.prompt_token_ids) if job is None else job.first.cached_tokens
            completions.append(Completion(choices, len(request.prompt_token_ids), found, answer.prompt_logprobs))
        return completions

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Piece, None, None]:
        """Continue one prompt, piece by piece; the pieces' texts together are the completion's text.

        For one choice: n, best_of and beam_width may not ask for more. Raises RequestError at once for what `generate`
        refuses. Stopping early frees the request.
        """
        tokens = ids_of(prompt, self._tokenizer)
        (params,) = self._params_for([tokens], params)
        if params.sampled_choices() > 1:
            raise RequestError(
                f"a stream has one choice, and {params.sampled_choices()} are asked for",
                at="params",
                fix="use generate, or the asyncio engine, whose streams have several",
            )
        job = self._job(0, GenerationRequest(prompt_token_ids=tuple(tokens), params=params, request_id="0"))
        (request,) = job.sequences
        assert isinstance(request, Generation), "beam search has more than one beam"
        return self._pieces(request, request.text or self._intake.output_text(params))

    @overload
    def logits(self, tokens: Sequence[int]) -> Logits: ...
    @overload
    def logits(self, tokens: Sequence[Sequence[int]]) -> list[Logits]: ...
    def logits(self, tokens: Sequence[int] | Sequence[Sequence[int]]) -> Logits | list[Logits]:
        """The logits after each token: [tokens, vocabulary], fp32, for one sequence; a list of them for several."""
        sequences = token_sequences(tokens, self._tokenizer)
        for index, sequence in enumerate(sequences):
            check_length(f"prompt {index}", sequence, self.limits.max_model_len, "")
            check_ids(f"prompt {index}", sequence, self.info.vocab_size)
        requests = [Scoring(sequence, self.info.vocab_size) for sequence in sequences]
        loop = self._loop
        try:
            for request in requests:
                loop.add(request)
            loop.run(requests)
        finally:
            for request in requests:
                loop.remove(request)
        return requests[0].logits if is_single(tokens) else [request.logits for request in requests]

    def report(self) -> Path:
        """Where the engine's page is: one HTML file with passes, graphs, kernels, roofline and memory. Raises
        EngineFormatError for an engine that was written without one."""
        return report_file(self._directory)

    def explain(self) -> str:
        """What the passes covered and what they left alone, and why; as `llmc explain` prints it. Raises
        EngineFormatError for an engine that was written without a report."""
        return explanation(self._directory)

    def predict(self, *, requests: int = 1, context: int = 1024, prefill: int | None = None) -> StepPrediction:
        """How long a step of a GPU engine should take, by the target's table: of `requests` tokens, one a request with
        `context` cached positions each, or else of a prompt of `prefill` tokens. Needs no GPU, but torch.

        Of an engine for several GPUs, the first. Raises TargetError for a CPU's engine.
        """
        return predicted_step(self._directory, requests, context, prefill)

    def save(self, path: str | Path) -> Path:
        """Copy the engine to another place, whole or not at all; returns that place."""
        return copy_engine(self._directory.path, self._directory.manifest, path_argument("path", path))

    def close(self) -> None:
        """Stop the threads, free the memory, delete a temporary engine directory."""
        if self._open_loop is not None:
            self._open_loop = None
            self._executor.close()
            self._grammars.close()
            if self._owned is not None:
                self._owned.cleanup()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _loop(self) -> StepLoop:
        if isinstance(self._executor, AbsentExecutor):
            raise self._executor.error
        if self._open_loop is None:
            raise RequestError("the engine is closed", at=self.path, fix="load it again")
        return self._open_loop

    def _params_for(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(prompts)
        if not isinstance(params, Sequence):
            raise _no_params(params)
        if len(params) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts came with {len(params)} sampling parameters",
                fix="give one SamplingParams for all prompts, or one for each",
            )
        for each in params:
            if not isinstance(each, SamplingParams):
                raise _no_params(each)
        return list(params)

    def _job(self, index: int, request: GenerationRequest) -> GenerationJob:
        where = f"prompt {index}"
        self._intake.check(where, request.prompt_token_ids, request.params)
        grammar = request.params.grammar
        new_mask = None if grammar is None else self._grammars.compile(grammar)
        return self._intake.job(request, new_mask=new_mask, where=where)

    def _run(self, jobs: Sequence[GenerationJob]) -> None:
        loop = self._loop
        try:
            for job in jobs:
                loop.add(job.first)
            while not all(job.finished for job in jobs):
                loop.step()
        finally:
            for job in jobs:
                for sequence in job.sequences:
                    loop.remove(sequence)

    def choice(self, result: ChoiceResult, params: SamplingParams) -> Choice:
        """A finished choice with its text."""
        text = result.text
        if text is None:
            text = self._tokenizer.decode(result.token_ids, skip_special_tokens=params.skip_special_tokens)
        return Choice(
            text,
            result.token_ids,
            result.finish_reason,
            result.stop_reason,
            result.logprobs,
            result.cumulative_logprob,
        )

    def _pieces(self, request: Generation, text: OutputText) -> Generator[Piece, None, None]:
        loop, told, decoded = self._loop, 0, 0
        loop.add(request)
        try:
            is_last = False
            while not is_last:
                if not request.finished:  # The steps of other callers may have brought it to its end.
                    self._loop.step()
                if request.error is not None:
                    raise request.error
                is_last, output = request.finished, request.output
                if text is not request.text:
                    for token in output[decoded:]:
                        text.add(token)
                    decoded = len(output)
                    if is_last:
                        text.finish()
                piece = text.read()
                if piece or is_last or not self._tokenizer.exists:
                    yield Piece(piece, output[told:], len(output), request.finish_reason if is_last else None)
                    told = len(output)
        finally:
            loop.remove(request)


def _answer(job: GenerationJob, where: str) -> CachedAnswer:
    """What a finished job gives. Raises its error."""
    if job.error is not None:
        raise type(job.error)(job.error.problem, at=where, fix=job.error.fix)
    return CachedAnswer(tuple(job.results()), job.prompt_logprobs)


def _no_params(value: object) -> RequestError:
    return RequestError(
        f"{value!r:.80} ({type(value).__name__}) is not a SamplingParams",
        fix="give llmc.SamplingParams(name=value, ...)",
    )
