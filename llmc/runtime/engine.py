"""The engine's public interface: logits, and the facts about an engine; text_generator.py generates text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, overload

from llmc.engine_format import EngineDirectory, EngineFiles, Manifest, ModelRecord
from llmc.engine_format.copy import copy_engine
from llmc.engine_format.path_argument import path_argument
from llmc.engine_format.weight_check import WeightCheck
from llmc.errors import RequestError, UnavailableError
from llmc.program import Limits
from llmc.runtime.adapters.registry import AdapterRegistry
from llmc.runtime.completer import Completer
from llmc.runtime.engine_record import explanation, predicted_step, report_file
from llmc.runtime.executors.absent import AbsentExecutor
from llmc.runtime.executors.executor import Logits, WarmingExecutor
from llmc.runtime.grammar.compiler import GrammarCompiler
from llmc.runtime.kv_tier.tier import Tier
from llmc.runtime.loop.shared_loop import SharedLoop
from llmc.runtime.loop.step_loop import StepLoop
from llmc.runtime.output_cache import OutputCache
from llmc.runtime.progress import Progress, telling
from llmc.runtime.requests.job_builder import JobBuilder, check_task
from llmc.runtime.requests.request_policies import RequestPolicies
from llmc.runtime.text.conversation import ConversationPrompts
from llmc.runtime.text.prompts import as_list, check_ids, check_length
from llmc.runtime.text.prompts import token_ids as ids_of
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.text_generator import TextGenerator

if TYPE_CHECKING:
    from llmc.files.scratch_directory import ScratchDirectory
    from llmc.prediction.device_step import StepPrediction


class Engine(TextGenerator):
    """A loaded engine, made by `llmc.load` or `llmc.compile`. Close it, or use it as a context manager.

    It may be called from any number of threads. Requests of all threads and streams share steps, and a request's tokens
    do not depend on the others.
    """

    def __init__(
        self,
        directory: EngineDirectory,
        open_loop: Callable[[], StepLoop],
        policies: RequestPolicies,
        owned: ScratchDirectory | None = None,
        *,
        prefix_cache: bool = True,
        output_cache_bytes: int = 0,
        check: WeightCheck | None = None,
        tier: Tier | None = None,
    ) -> None:
        self._directory = directory
        self._tier = tier
        self._check = check
        self._open_loop = open_loop
        loop = open_loop()
        self._executor = executor = loop.executor
        self._shared = SharedLoop(loop, executor.error if isinstance(executor, AbsentExecutor) else None)
        self._owned = owned
        self._tokenizer = Tokenizer(directory.files)
        finds_prefixes = prefix_cache and loop.finds_prefixes
        self._job_builder = JobBuilder(
            directory.manifest.model,
            directory.program.limits,
            self._tokenizer,
            policies,
            prefix_cache=finds_prefixes,
        )
        self._adapters = AdapterRegistry(directory.program.adapters)
        self._grammars = GrammarCompiler(
            self._tokenizer.path, directory.manifest.model.vocab_size, directory.manifest.model.eos_token_ids
        )
        self._output_cache = OutputCache(output_cache_bytes) if output_cache_bytes else None
        parts = (self._shared, self._job_builder, self._grammars, self._tokenizer, self._output_cache, self._adapters)
        completer = Completer(*parts)
        super().__init__(completer, ConversationPrompts(directory.files, self._tokenizer))

    @property
    def path(self) -> Path:
        """The engine directory."""
        return self._directory.path

    @property
    def files(self) -> EngineFiles:
        """The files of the engine directory, as the manifest lists them."""
        return self._directory.files

    @property
    def info(self) -> ModelRecord:
        """The model that the engine was built from."""
        return self._directory.manifest.model

    @property
    def manifest(self) -> Manifest:
        """The engine's manifest."""
        return self._directory.manifest

    @property
    def limits(self) -> Limits:
        """Limits of the engine: tokens per sequence, and tokens, requests and logit rows per step."""
        return self._directory.program.limits

    def wait_until_checked(self) -> None:
        """Wait until the weights have been compared with their hashes. Answers wait for this as well.

        Raises:
            EngineFormatError: If the weights are corrupt.
        """
        if self._check is not None:
            self._check.wait()

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer; `exists` is false if the engine has none."""
        return self._tokenizer

    @property
    def completer(self) -> Completer:
        """Serves callers that wait for their answers."""
        return self._completer

    @property
    def conversations(self) -> ConversationPrompts:
        """Makes prompts of conversations."""
        return self._conversations

    @property
    def loop(self) -> StepLoop:
        """The loop that runs the requests of all threads. For inspection only; `shared_loop` steps it."""
        return self._shared.loop

    @property
    def shared_loop(self) -> SharedLoop:
        """The loop for servers. It raises TargetError if this machine cannot run the engine."""
        return self._shared

    @property
    def job_builder(self) -> JobBuilder:
        """Checks requests and makes their sequences."""
        return self._job_builder

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars for the engine's vocabulary."""
        return self._grammars

    @property
    def adapters(self) -> AdapterRegistry:
        """The LoRA adapters that requests may name."""
        return self._adapters

    def load_adapter(self, name: str, directory: str | Path) -> None:
        """Read a LoRA adapter, for requests with `generate(…, adapter=name)`.

        Args:
            name: The name of the adapter in requests.
            directory: A directory that PEFT has saved.

        Raises:
            AdapterError: If the adapter cannot be read, does not fit the engine, or the name is in use.
        """
        self._adapters.load(name, path_argument("directory", directory))

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Running requests keep it.

        Args:
            name: The adapter's name.

        Raises:
            AdapterError: For an unknown name.
        """
        self._adapters.unload(name)

    @property
    def output_cache(self) -> OutputCache | None:
        """The cache of answers; None if it is disabled."""
        return self._output_cache

    def tokenize(self, text: str) -> list[int]:
        """Tokenize a text, as in a prompt.

        Args:
            text: The text.

        Returns:
            Its token ids, with the special tokens that the tokenizer adds to prompts.

        Raises:
            RequestError: If the engine has no tokenizer.
        """
        if not isinstance(text, str):
            raise RequestError(f"a text cannot be {text!r:.80} ({type(text).__name__})", fix="give a str")
        return self._tokenizer.encode(text)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Decode token ids.

        Args:
            token_ids: Token ids below the model's vocabulary size.

        Returns:
            The text without special tokens; empty if the engine has no tokenizer.

        Raises:
            RequestError: For ids that are not in the vocabulary.
        """
        ids = ids_of(token_ids, self._tokenizer)
        check_ids("token_ids", ids, self.info.vocab_size)
        return self._tokenizer.decode(ids)

    @overload
    def logits(self, tokens: Sequence[int], *, adapter: str | None = None) -> Logits: ...
    @overload
    def logits(self, tokens: Sequence[Sequence[int]], *, adapter: str | None = None) -> list[Logits]: ...
    def logits(
        self, tokens: Sequence[int] | Sequence[Sequence[int]], *, adapter: str | None = None
    ) -> Logits | list[Logits]:
        """The logits after each token.

        Args:
            tokens: A sequence of token ids, or several sequences.
            adapter: The name of a loaded adapter; None uses the plain model.

        Returns:
            A numpy array [tokens, vocabulary] in fp32, or a list with one for each sequence.

        Raises:
            RequestError: For a sequence that is empty or too long, or an id outside of the vocabulary.
        """
        check_task(self.info.head, wants_row=False)
        prompts, is_one = as_list(tokens)
        sequences = [ids_of(ids, self._tokenizer) for ids in prompts]
        for index, sequence in enumerate(sequences):
            check_length(f"prompt {index}", sequence, self.limits.max_model_len, "")
            check_ids(f"prompt {index}", sequence, self.info.vocab_size)
            self._job_builder.check_room(f"prompt {index}", len(sequence))
        chosen = None if adapter is None else self._adapters.get(adapter)
        requests = [self._job_builder.scoring(sequence, chosen) for sequence in sequences]
        with self._shared.serving(requests) as until:
            until(lambda: all(request.finished for request in requests))
        for request in requests:
            if request.error is not None:
                raise request.error
        return requests[0].logits if is_one else [request.logits for request in requests]

    def warm_up(self, *, progress: Progress = False) -> None:
        """Capture the graphs of usual steps on a GPU, which otherwise happens at their second use; elsewhere, do
        nothing. Requests of other threads are refused meanwhile.

        Args:
            progress: True for a bar on standard error, or a function of (graphs that are ready, all graphs).

        Raises:
            RequestError: If the engine is closed, or has requests in flight.
            TargetError: If the GPU is out of memory.
        """
        executor = self._executor
        if not isinstance(executor, WarmingExecutor):
            return
        self._shared.claim(_warming_up)
        try:
            steps = executor.warm_up()
            _, total = next(steps, (0, 0))
            with telling(progress if total else False, total, "graphs") as tell:
                for done, _ in steps:
                    if tell is not None:
                        tell(done, total)
        finally:
            self._shared.unclaim()

    def report(self) -> Path:
        """Find the engine's report: one HTML file with passes, graphs, kernels, roofline and memory.

        Returns:
            The path of the file.

        Raises:
            EngineFormatError: If the engine was written without a report.
        """
        return report_file(self._directory)

    def explain(self) -> str:
        """Explain what the passes did.

        Returns:
            The text that `llmc explain` prints: coverage, rewrites and refusals.

        Raises:
            EngineFormatError: If the engine has no report.
        """
        return explanation(self._directory)

    def predict(self, *, requests: int = 1, context: int | None = None, prefill: int | None = None) -> StepPrediction:
        """Predict the time of a GPU engine's step from the target's table. Needs torch, but not a GPU.

        For an engine for several GPUs, the prediction is for the first.

        Args:
            requests: Number of requests of a decode step.
            context: Number of cached positions of each request; default 1024, or the maximum length if shorter.
            prefill: Number of tokens of a prompt, to predict a prefill step instead.

        Returns:
            The time in seconds, the bytes and operations, and their shares of the device's limits.

        Raises:
            TargetError: For a CPU engine.
            OptionError: For a step beyond the engine's limits.
        """
        return predicted_step(self._directory, requests, context, prefill)

    def reopen(self) -> StepLoop:
        """Reopen the executor, with empty caches, after a step has failed. For the owner of the loop.

        Returns:
            The new loop of steps.

        Raises:
            LlmcError: As for opening the engine, such as TargetError.
        """
        with suppress(Exception):  # Close the broken parts first.
            self._close_executors()
        loop = self._open_loop()
        self._executor = loop.executor
        return self._shared.renew(loop)

    def save(self, path: str | Path) -> Path:
        """Copy the engine directory to `path`, atomically.

        Args:
            path: The new directory. An engine that exists there is replaced.

        Returns:
            The path of the copy.
        """
        return copy_engine(self._directory.path, self._directory.manifest, path_argument("path", path))

    def close(self) -> None:
        """Stop the threads, free the memory, and delete a temporary engine directory.

        Requests of other threads in flight end with an UnavailableError.

        Raises:
            RequestError: If an AsyncEngine uses the engine.
        """
        if self._shared.close(self._closed):
            if self._tier is not None:
                with suppress(Exception):  # The blocks of a broken executor will not be found again.
                    self.loop.offload_all()
                self._tier.close()
            self._close_executors()
            self._grammars.close()
            self._conversations.close()
            if self._owned is not None:
                self._owned.cleanup()

    def __repr__(self) -> str:
        manifest = self.manifest
        return (
            f"<Engine {manifest.model.name} ({manifest.model.dtype}) for {manifest.target.name}: "
            f"sequences of {self.limits.max_model_len} tokens, {self.limits.max_sequences} at a time>"
        )

    def _close_executors(self) -> None:
        self._executor.close()
        if self.loop.speculation is not None:
            self.loop.speculation.close()

    def _closed(self) -> RequestError:
        return UnavailableError("the engine is closed", at=self.path, fix="load it again")


def _warming_up() -> RequestError:
    return RequestError("the engine captures graphs before its first request", fix="call it when warm_up has returned")
