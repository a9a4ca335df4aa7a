"""Serve callers that wait for their answers: prompts in, completions or the pieces of a stream out."""

import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from llmc.errors import RequestError, RequestWarning
from llmc.runtime.adapters.placed_adapter import PlacedAdapter
from llmc.runtime.adapters.registry import AdapterChoice, AdapterRegistry
from llmc.runtime.grammar.compiler import GrammarCompiler
from llmc.runtime.loop.shared_loop import SharedLoop
from llmc.runtime.output_cache import CachedAnswer, OutputCache
from llmc.runtime.progress import Progress, Told, telling
from llmc.runtime.requests.boundary import as_llmc_error
from llmc.runtime.requests.completion import Choice, Completion, Piece
from llmc.runtime.requests.generation import Generation
from llmc.runtime.requests.generation_job import GenerationJob
from llmc.runtime.requests.generation_request import GenerationRequest
from llmc.runtime.requests.job_builder import JobBuilder
from llmc.runtime.requests.request_output import ChoiceResult, Row
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.text.piece_stream import pieces
from llmc.runtime.text.tokenizer import Tokenizer

# Seconds between reports of progress.
_PROGRESS_SECONDS = 0.1


@dataclass(frozen=True)
class Completer:
    """The parts of an engine that a request meets. For any thread."""

    loop: SharedLoop
    job_builder: JobBuilder
    grammars: GrammarCompiler
    tokenizer: Tokenizer
    cache: OutputCache | None
    adapters: AdapterRegistry
    # The policy of requests that name none; None is that of the engine.
    kv_compression: str | None = None

    def with_kv_compression(self, policy: str) -> "Completer":
        """The same with another policy for requests that name none. Raises OptionError for one that cannot be run."""
        self.job_builder.policies.check(policy)
        return replace(self, kv_compression=policy)

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        progress: Progress,
        adapter: AdapterChoice = None,
    ) -> list[Completion]:
        """Return one completion per prompt, in order. Raises RequestError before anything is computed, or the error of
        a request."""
        with as_llmc_error():
            requests = self._requests(prompts, params, self.adapters.of_each(len(prompts), adapter))
            completions = []
            for request, (answer, cached_tokens) in zip(requests, self._answers(requests, progress), strict=True):
                choices = tuple(self._choice(result, request.params) for result in answer.results)
                completions.append(
                    Completion(choices, len(request.prompt_token_ids), cached_tokens, answer.prompt_logprobs)
                )
            return completions

    def rows(self, texts: Sequence[Sequence[int]], progress: Progress, adapter: str | None = None) -> list[Row]:
        """The model's row for each text, [width], in order. Raises as `complete` does."""
        with as_llmc_error():
            chosen = None if adapter is None else self.adapters.get(adapter)
            requests = self._requests(texts, [SamplingParams()] * len(texts), [chosen] * len(texts), wants_row=True)
            rows = [answer.results[0].row for answer, _ in self._answers(requests, progress)]
            return [row for row in rows if row is not None]

    def _answers(self, requests: Sequence[GenerationRequest], progress: Progress) -> Iterator[tuple[CachedAnswer, int]]:
        """Yield all requests' answers, and the number of tokens of each that were found in a cache."""
        cached = [None if self.cache is None else self.cache.get(request) for request in requests]
        jobs = [None if a else self._job(i, r) for i, (r, a) in enumerate(zip(requests, cached, strict=True))]
        with telling(progress, len(jobs)) as advance:
            self._run([job for job in jobs if job is not None], advance)
        for index, (request, answer, job) in enumerate(zip(requests, cached, jobs, strict=True)):
            if answer is None:
                assert job is not None
                answer = _answer(job, f"prompt {index}")
                if self.cache is not None:
                    self.cache.put(request, answer)
            yield answer, len(request.prompt_token_ids) if job is None else job.first.standing.cached_tokens

    def stream(
        self, prompt: Sequence[int], params: SamplingParams, adapter: str | None = None
    ) -> Generator[Piece, None, None]:
        """Yield pieces as they are generated. Raises RequestError at once for a request that cannot be served."""
        if params.sampled_choices() > 1:
            raise RequestError(
                f"a stream returns one choice, but {params.sampled_choices()} were requested",
                at="params",
                fix="use generate, or the asyncio engine, whose streams have several",
            )
        with as_llmc_error():
            chosen = None if adapter is None else self.adapters.get(adapter)
            job = self._job(0, *self._requests([prompt], [params], [chosen]))
        (request,) = job.sequences
        assert isinstance(request, Generation), "beam search has more than one beam"
        return pieces(self.loop, request, self.job_builder.output_text(params), has_text=self.tokenizer.exists)

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        adapters: Sequence[PlacedAdapter | None],
        wants_row: bool = False,
    ) -> list[GenerationRequest]:
        if self.kv_compression is not None:
            params = [
                replace(own, kv_compression=self.kv_compression) if own.kv_compression is None else own
                for own in params
            ]
        return [
            GenerationRequest(
                prompt_token_ids=tuple(prompt), params=own, request_id=str(i), adapter=adapter, wants_row=wants_row
            )
            for i, (prompt, own, adapter) in enumerate(zip(prompts, params, adapters, strict=True))
        ]

    def _job(self, index: int, request: GenerationRequest) -> GenerationJob:
        self.job_builder.check(f"prompt {index}", request)
        grammar = request.params.grammar
        compiled = None if grammar is None else self.grammars.compile(grammar)
        for note in () if compiled is None else compiled.notes:
            warnings.warn(note, RequestWarning, stacklevel=2)
        return self.job_builder.job(request, new_masks=compiled)

    def _run(self, jobs: Sequence[GenerationJob], advance: Told | None) -> None:
        with self.loop.serving([job.first for job in jobs]) as until:
            if advance is None:
                until(lambda: all(job.finished for job in jobs))
                return
            done = -1
            while done < len(jobs):
                later = time.monotonic() + _PROGRESS_SECONDS

                def is_time(later: float = later) -> bool:
                    return time.monotonic() > later or all(job.finished for job in jobs)

                until(is_time)
                if done != (done := sum(job.finished for job in jobs)):
                    advance(done, len(jobs))

    def _choice(self, result: ChoiceResult, params: SamplingParams) -> Choice:
        """A finished choice with its text."""
        text = result.text
        if text is None:
            text = self.job_builder.decoder(params)(result.token_ids)
        return Choice(
            text,
            result.token_ids,
            result.finish_reason,
            result.stop_reason,
            result.logprobs,
            result.cumulative_logprob,
        )


def _answer(job: GenerationJob, where: str) -> CachedAnswer:
    """The answer of a finished job. Raises its error."""
    if job.error is not None:
        raise type(job.error)(job.error.problem, at=where, fix=job.error.fix) from job.error.__cause__
    return CachedAnswer(tuple(job.results()), job.prompt_logprobs)
