"""Check a client's request against the engine, and make the sequences that will serve it."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from llmc.engine_format import ModelRecord
from llmc.errors import RequestError
from llmc.program import Head, Limits, Task
from llmc.runtime.adapters.placed_adapter import PlacedAdapter
from llmc.runtime.prefix_cache.block_digests import BlockDigests, prefix_salt
from llmc.runtime.prefix_cache.prefix_cache import hash_prompt
from llmc.runtime.requests.beam_search import BeamSearch
from llmc.runtime.requests.ending import Ending
from llmc.runtime.requests.generation import Generation, Scoring
from llmc.runtime.requests.generation_job import GenerationJob, SampledJob
from llmc.runtime.requests.generation_request import GenerationRequest
from llmc.runtime.requests.request import Origin
from llmc.runtime.requests.request_policies import RequestPolicies
from llmc.runtime.requests.second_reading import check_room, instruction_of
from llmc.runtime.requests.text_row import TextRow
from llmc.runtime.sampling.logit_edits import logit_edits
from llmc.runtime.sampling.sampler import Sampler, TokenMask
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.text.output_text import Decode, OutputText
from llmc.runtime.text.prompts import check_ids, check_length
from llmc.runtime.text.tokenizer import Tokenizer

# Number of choices for which masks at the beginning of a grammar are prepared.
NewMasks = Callable[[int], Sequence[TokenMask]]


def check_task(head: Head | None, *, wants_row: bool) -> None:
    """Raise RequestError unless a model with that head gives such answers: a row of a text, or tokens."""
    if wants_row == (head is not None):
        return
    if head is None:
        raise RequestError(
            "the engine generates text and cannot return vectors, scores or labels",
            fix="for those, build an engine with task=embed, score or classify (--task) of a model that is made for it",
        )
    outputs = {
        Task.EMBED: "vectors of texts (embed, or POST /v1/embeddings)",
        Task.SCORE: "scores of texts (score, or POST /v1/rerank)",
    }
    output = outputs.get(head.task, "labels of texts (classify, or POST /v1/classify)")
    raise RequestError(
        f"the engine returns {output} and generates no text",
        fix="to generate, build an engine with task=generate (--task) of a model that is made for it",
    )


class JobBuilder:
    """The facts about an engine that checks need. prefix_cache: whether requests may share cached prefixes. head: the
    engine's head; None if it generates. longest_text: in tokens. policies: the policies of requests' caches."""

    def __init__(
        self,
        info: ModelRecord,
        limits: Limits,
        tokenizer: Tokenizer,
        policies: RequestPolicies,
        *,
        prefix_cache: bool,
    ) -> None:
        self._info, self.head, self.policies = info, info.head, policies
        self._limits = limits
        self._tokenizer = tokenizer
        self.longest_text = limits.max_model_len
        self._prefix_cache = prefix_cache
        self._digests = BlockDigests(limits.block_size, policies.groups)
        self._instruction = instruction_of(policies.built, tokenizer)

    def check(self, where: str, request: GenerationRequest) -> None:
        """Raise RequestError if this engine cannot serve the request. where: names the prompt in errors."""
        tokens, params = request.prompt_token_ids, request.params
        check_task(self.head, wants_row=request.wants_row)
        self.policies.of(params.kv_compression)
        if request.wants_row:
            check_length(where, tokens, self._limits.max_model_len, "")
            self.check_room(where, len(tokens), params.kv_compression)
            return check_ids(where, tokens, self._info.vocab_size)
        room, purpose = (1, " and one token of output") if params.max_tokens else (0, "")
        check_length(where, tokens, self._limits.max_model_len - room, purpose)
        self.check_room(where, len(tokens), params.kv_compression)
        for place, ids in (
            (where, tokens),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            check_ids(place, ids, self._info.vocab_size)
        if params.stop and not self._tokenizer.exists:
            raise RequestError(
                "stop strings need a tokenizer, and the engine has none", at="stop", fix="use stop_token_ids instead"
            )
        if params.grammar is not None and not self._tokenizer.exists:
            raise RequestError(
                "a grammar needs a tokenizer, and the engine has none",
                at="grammar",
                fix="rebuild the engine from a model directory with a tokenizer.json",
            )

    def check_room(self, where: str, tokens: int, kv_compression: str | None = None) -> None:
        """Raise RequestError for a policy that has no room to read such a prompt again, or that cannot be run."""
        check_room(where, self.policies.in_use(kv_compression), tokens, self._limits, self._instruction)

    def scoring(self, tokens: Sequence[int], adapter: PlacedAdapter | None) -> Scoring:
        """The sequence that gathers the logits of a text."""
        return Scoring(tokens, self._info.vocab_size, adapter, self.policies.of(None), self._instruction)

    def job(
        self,
        request: GenerationRequest,
        *,
        arrived: float | None = None,
        new_masks: NewMasks | None = None,
    ) -> GenerationJob:
        """The sequences for a request that `check` has passed. new_masks: what its grammar was compiled to. Raises
        RequestError for texts that the tokenizer cannot express (bad_words)."""
        job = self._job(request, arrived, new_masks)
        hash_prompt(job.first, self._digests)
        return job

    def _job(self, request: GenerationRequest, arrived: float | None, new_masks: NewMasks | None) -> GenerationJob:
        tokens, params = list(request.prompt_token_ids), request.params
        ending = self._ending(len(tokens), params)
        deadline = None
        if request.deadline_seconds is not None and arrived is not None:
            deadline = arrived + request.deadline_seconds
        digest = None if request.adapter is None else request.adapter.digest
        salt = prefix_salt(request.tenant, digest) if self._prefix_cache else None
        if self.head is not None and self.head.whole_texts:
            salt = None  # Nothing of a text that is read as a whole can be found in a cache.
        policy = self.policies.of(params.kv_compression)
        origin = Origin(request.priority, salt, arrived, deadline, request.adapter, policy, self._instruction)
        if request.wants_row:
            return TextRow(tokens, origin)
        edits = logit_edits(params, self._tokenizer, self._info.vocab_size)
        if params.beam_width is not None:
            text = self.output_text(params) if params.stop else None
            return BeamSearch(tokens, params, ending, origin, text, edits, dtype=self._info.dtype)
        count = params.sampled_choices()
        ends = np.asarray(sorted(ending.end_ids), np.int64)
        prompt = np.asarray(tokens, np.int64)
        logprobs = 0 if params.logprobs is None and count > params.n else params.logprobs
        choices: list[Generation] = []
        masks: Sequence[TokenMask | None] = [None] * count if new_masks is None else new_masks(count)
        for index in reversed(range(count)):
            choices.append(
                Generation(
                    tokens,
                    Sampler(
                        params,
                        prompt,
                        self._info.vocab_size,
                        ends,
                        choice=index,
                        mask=masks[index],
                        edits=edits,
                        dtype=self._info.dtype,
                    ),
                    ending,
                    origin=origin,
                    index=index,
                    text=self.output_text(params) if params.stop else None,
                    logprobs=logprobs,
                    # The first choice is made last: it computes the prompt and then starts the others.
                    prompt_logprobs=params.prompt_logprobs if index == 0 else None,
                    siblings=choices[::-1] if index == 0 else (),
                )
            )
        return SampledJob(tuple(choices[::-1]), params.n, params.logprobs is not None)

    def output_text(self, params: SamplingParams) -> OutputText:
        """An empty output of a request with these parameters."""
        return OutputText(self.decoder(params), params.stop_strings(), keep_stop=params.include_stop_str_in_output)

    def decoder(self, params: SamplingParams) -> Decode:
        """Return the function that gives the text of an output's tokens for a request with these parameters.

        Where special tokens are left out, the token that ends the output is one, marked so in tokenizer.json or not.
        """
        if not params.skip_special_tokens:
            return partial(self._tokenizer.decode, skip_special_tokens=False)
        ends = () if params.ignore_eos else self._info.eos_token_ids
        return lambda ids: self._tokenizer.decode([token for token in ids if token not in ends])

    def _ending(self, prompt_tokens: int, params: SamplingParams) -> Ending:
        return Ending(
            eos_ids=frozenset(() if params.ignore_eos else self._info.eos_token_ids),
            stop_ids=frozenset(params.stop_token_ids),
            max_length=min(prompt_tokens + params.max_tokens, self._limits.max_model_len),
            min_tokens=params.min_tokens,
        )
