"""The object shared by all routes: the engine with its names, defaults, chat template and server settings."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fastapi.routing import APIRoute

from llmc.errors import ContextLengthError
from llmc.runtime.adapters.placed_adapter import PlacedAdapter
from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.requests.job_builder import check_task
from llmc.runtime.server.errors import ApiError, bad_request
from llmc.runtime.server.lifecycle import Lifecycle
from llmc.runtime.server.marks import MarkTexts
from llmc.runtime.server.render_queue import RenderQueue
from llmc.runtime.server.request_metrics import RequestMetrics
from llmc.runtime.server.responses.store import ResponseStore
from llmc.runtime.server.sampling import SamplingDefaults
from llmc.runtime.server.thinking import ThinkTags
from llmc.runtime.server.token_texts import TokenTexts
from llmc.runtime.server.tokenizing import Tokenizing
from llmc.runtime.server.tool_calls.form import ToolForm
from llmc.runtime.server.unknown_fields import WarningRoute
from llmc.runtime.text.chat_template import ChatTemplate
from llmc.runtime.text.prompts import check_ids
from llmc.runtime.text.template_renderer import RenderedPrompt, TemplateInput


@dataclass(frozen=True)
class ServedModel:
    """The model that a server serves. names: what requests may call the model, the first is how it calls itself.
    template: None if it has none.

    tool_form: the form of the model's tool calls; is_form_known: whether the template determines it. think_tags: the
    tags around thoughts; None if the model does not think. max_model_len: tokens of prompt and output together.
    request_renderer: renderer of templates in requests; None if they are not allowed. max_waiting: maximum number of
    waiting sequences before new requests get 429; None means no limit. stall_seconds: a longer step makes the server
    unhealthy. warns_of_unknown: unknown fields of requests are ignored with a warning. allows_lora_updates: requests
    may load and unload adapters.
    """

    engine: AsyncEngine
    names: Sequence[str]
    max_model_len: int
    defaults: SamplingDefaults
    template: ChatTemplate | None
    tool_form: ToolForm
    is_form_known: bool
    think_tags: ThinkTags | None
    renderer: RenderQueue
    texts: TokenTexts
    tokenizing: Tokenizing
    marks: MarkTexts
    metrics: RequestMetrics
    lifecycle: Lifecycle
    responses: ResponseStore
    seeds: random.Random | None = None
    request_renderer: RenderQueue | None = None
    max_waiting: int | None = None
    stall_seconds: float = 30.0
    warns_of_unknown: bool = False
    allows_lora_updates: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def route_class(self) -> type[APIRoute]:
        """The route class of routes with bodies."""
        return WarningRoute if self.warns_of_unknown else APIRoute

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.engine.engine.info.vocab_size

    def check_name(self, name: str | None) -> None:
        """404 for a model that is not served here; no name means this one, that of an adapter the model with it."""
        self.adapter(name)

    def adapter(self, name: str | None) -> PlacedAdapter | None:
        """The adapter that a request's model names; None for the model itself, 404 for neither."""
        if not name or name in self.names:
            return None
        adapters = self.engine.engine.adapters
        placed = adapters.find(name)
        if placed is None:
            raise ApiError(
                404,
                f"the model {name!r:.100} does not exist; served here: {', '.join((*self.names, *adapters.names()))}",
                param="model",
                code="model_not_found",
            )
        return placed

    def next_seed(self) -> int | None:
        """A seed for a request that brings none, from the server's own; None if the server was given none."""
        return None if self.seeds is None else self.seeds.getrandbits(63)

    def check_generates(self) -> None:
        """400 for an engine that gives vectors, scores or labels, whatever else the request lacks."""
        check_task(self.engine.engine.info.head, wants_row=False)

    def check_room(self) -> None:
        """429 when too many requests wait already, or are being tokenized."""
        if self.max_waiting is None:
            return
        if self.engine.stats().waiting + self.tokenizing.pending >= self.max_waiting:
            raise ApiError(429, f"{self.max_waiting} requests are waiting already; try again later", retry_after=1)

    async def tokenize(
        self, text: str, add_special_tokens: bool, most: int | None = None, *, fix: str = "shorten it"
    ) -> list[int]:
        """Token ids of a text. most: maximum number of tokens, default max_model_len; ContextLengthError with `fix` for
        more."""
        return await self.tokenizing.ids(text, add_special_tokens, self.max_model_len if most is None else most, fix)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        check_ids("tokens", ids, self.vocab_size)
        return self.engine.engine.tokenizer.decode(ids, skip_special_tokens=False)

    async def render(self, given: TemplateInput, template: str | None) -> RenderedPrompt:
        """The prompt of chat messages. template: one that the request brought or names, else the model's."""
        own = self.template
        if own is not None and template is not None and template in own.named:
            own, template = replace(own, source=own.named[template], named={}), None
        if template is not None and self.request_renderer is None:
            raise bad_request(
                "this server does not accept chat templates from requests: it was started without "
                "--trust-request-chat-template",
                "chat_template",
            )
        if template is None and own is None:
            raise bad_request(
                "the model has no chat template: use /v1/completions, or start the server with --chat-template FILE "
                "(or one of the built-in ones: --chat-template plain)",
                "messages",
            )
        if given.continue_final_message and given.add_generation_prompt:
            raise bad_request(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        special_tokens = {} if own is None else own.special_tokens
        example = self.tool_form.example
        chosen = own if template is None else ChatTemplate(template, special_tokens, call_example=example)
        renderer = self.renderer if template is None else self.request_renderer
        assert chosen is not None and renderer is not None
        return await renderer.render(chosen, given)

    def output_limit(self, asked: int | None, prompt_tokens: int, param: str) -> int:
        """The number of tokens that may be generated. None stands for all that fit. Raises ContextLengthError if the
        two do not fit together."""
        room = self.max_model_len - prompt_tokens
        least = 1 if asked is None else asked
        if room < least:
            is_prompt = prompt_tokens >= self.max_model_len
            raise ContextLengthError(
                f"the prompt has {prompt_tokens} tokens and {least} more were requested, but this model takes at most "
                f"{self.max_model_len} together",
                at="prompt" if is_prompt else param,
                fix="shorten the prompt" if is_prompt else f"shorten the prompt, or request at most {room}",
            )
        return room if asked is None else asked
