"""Generation for Engine and LLM: continue prompts and answer conversations, at once or as a stream."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Self, Unpack

from llmc.api.keywords import shows_keywords
from llmc.runtime.adapters.registry import AdapterChoice
from llmc.runtime.completer import Completer
from llmc.runtime.progress import Progress
from llmc.runtime.requests.completion import Completion, Piece
from llmc.runtime.sampling.sampling_keywords import SamplingKeywords, chosen_params, params_of_each, sampling_defaults
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.text.conversation import Conversation, ConversationPrompts, conversations
from llmc.runtime.text.prompts import Prompt, Prompts, token_ids, token_sequences
from llmc.runtime.text_reader import TextReader


class TextGenerator(TextReader, ABC):
    """Base of Engine and LLM. Close it, or use it as a context manager.

    chat_template: the template of conversations that name none; None is the model's.
    """

    def __init__(
        self, completer: Completer, conversations: ConversationPrompts, chat_template: str | None = None
    ) -> None:
        super().__init__(completer)
        self._conversations = conversations
        self._chat_template = chat_template

    @shows_keywords(SamplingKeywords, sampling_defaults())
    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterChoice = None,
        progress: Progress = False,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[Completion]:
        """Continue one prompt or several, which share steps.

        Args:
            prompts: A prompt or an iterable of prompts: texts, lists of token ids, or dicts with "prompt" or
                "prompt_token_ids".
            params: Parameters for all prompts, or one per prompt; default greedy.
            adapter: The name of a loaded adapter (Engine.load_adapter), or a list with one for each prompt; None uses
                the plain model.
            progress: True for a progress bar on standard error, or a function that is called with the number of
                finished prompts and the total.
            **sampling: The fields of SamplingParams, such as max_tokens=5, instead of `params`.

        Returns:
            One completion per prompt, in order.

        Raises:
            RequestError: For a prompt or parameter that this engine cannot serve, before anything is computed.
            UnavailableError: If the engine is closed meanwhile.
        """
        sequences = token_sequences(prompts, self._completer.tokenizer)
        return self._completer.complete(sequences, params_of_each(len(sequences), params, sampling), progress, adapter)

    @shows_keywords(SamplingKeywords, sampling_defaults())
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Generator[Piece, None, None]:
        """Continue one prompt, piece by piece.

        Closing the generator early frees the request.

        Args:
            prompt: A prompt, as in `generate`.
            params: Its parameters, for one choice: n, best_of and beam_width must be 1 or None.
            adapter: The name of a loaded adapter; None uses the plain model.
            **sampling: The fields of SamplingParams, instead of `params`.

        Returns:
            The pieces; their texts together are the completion's text.

        Raises:
            RequestError: As in `generate`, at the call.
        """
        tokens = token_ids(prompt, self._completer.tokenizer)
        return self._completer.stream(tokens, chosen_params(params, sampling), adapter)

    @shows_keywords(SamplingKeywords, sampling_defaults())
    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: AdapterChoice = None,
        progress: Progress = False,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[Completion]:
        """Answer one conversation or several, which share steps.

        Args:
            messages: A conversation or an iterable of conversations: lists of {"role": ..., "content": ...}, as in
                OpenAI's API.
            params: As in `generate`.
            tools: Tools for the template, as in OpenAI's API.
            chat_template: A template's text, a Jinja file, or the name of a built-in one, `plain` or `chatml`; default
                the model's.
            add_generation_prompt: Whether the template opens the answer.
            continue_final_message: Continue the last message instead of answering it.
            chat_template_kwargs: Other variables of the template.
            adapter: As in `generate`, and so are `progress` and `sampling`.

        Returns:
            One completion per conversation, in order.

        Raises:
            RequestError: As in `generate`, and for a conversation that the template cannot render.
        """
        prompts = [
            self._conversations.token_ids(
                conversation,
                tools=tools,
                chat_template=self._template(chat_template),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations(messages)
        ]
        return self._completer.complete(prompts, params_of_each(len(prompts), params, sampling), progress, adapter)

    @shows_keywords(SamplingKeywords, sampling_defaults())
    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Generator[Piece, None, None]:
        """Answer one conversation, piece by piece. Arguments as in `chat`, result as in `stream`."""
        tokens = self._conversations.token_ids(
            messages,
            tools=tools,
            chat_template=self._template(chat_template),
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._completer.stream(tokens, chosen_params(params, sampling), adapter)

    @abstractmethod
    def close(self) -> None:
        """Free the engine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _template(self, given: str | None) -> str | None:
        return self._chat_template if given is None else given
