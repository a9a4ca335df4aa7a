"""Results of Engine and LLM for whole texts: vectors, scores or labels, depending on the engine."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from llmc.errors import RequestError
from llmc.program import Head, Task
from llmc.runtime.completer import Completer
from llmc.runtime.head_rows import (
    Classification,
    Rows,
    activated,
    classification,
    embedding,
    similarity,
    stacked,
)
from llmc.runtime.progress import Progress
from llmc.runtime.requests.job_builder import check_task
from llmc.runtime.requests.request_output import Row
from llmc.runtime.text.prepared_text import DOCUMENT, QUERY, known_prompt, prepared
from llmc.runtime.text.prompts import Prompt, Prompts, token_ids, token_sequences


class TextReader:
    """Computes rows of texts: embeddings, scores and labels. completer: serves the requests."""

    def __init__(self, completer: Completer) -> None:
        self._completer = completer

    def embed(
        self,
        texts: Prompts,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        adapter: str | None = None,
        progress: Progress = False,
    ) -> Rows:
        """Compute a vector for each text. Texts of any lengths share steps.

        Args:
            texts: A text or an iterable of texts, as in `generate`.
            dimensions: Number of leading elements to keep, for Matryoshka models.
            normalize: Whether to scale vectors to length 1; None follows the model's modules.
            prompt_name: The prompt to prepend to each text, as named by sentence-transformers; None is the model's
                default, if it has one. Token ids are used unchanged.
            truncate: Whether to cut texts that are longer than the engine's limit.
            adapter: As in `generate`, and so is `progress`.

        Returns:
            A numpy array [texts, width] in fp32.

        Raises:
            RequestError: For a text that is too long, an unknown prompt, or an engine that is not built with
                task=embed.
        """
        head = self._head(Task.EMBED)
        prepare = partial(prepared, head.preparation, name=prompt_name)
        sequences = token_sequences(texts, self._completer.tokenizer, prepare)
        rows = self._rows(sequences, truncate, progress, adapter)
        kept = head.width if dimensions is None else dimensions
        return stacked([embedding(head, row, dimensions, normalize) for row in rows], kept)

    def score(
        self,
        query: Prompt | Sequence[Prompt],
        documents: Prompts,
        *,
        activation: bool = True,
        truncate: bool = False,
        adapter: str | None = None,
        progress: Progress = False,
    ) -> list[float]:
        """Compute how well each document fits a query.

        An engine built with task=score reads query and document as a pair of texts. An engine built with task=embed
        compares their vectors, by the cosine unless its model says otherwise, with its prompts for queries and
        documents.

        Args:
            query: One query, or a list with one per document.
            documents: A document or an iterable of documents.
            activation: Whether to apply the scorer's activation; otherwise scores are logits.
            truncate: As in `embed`, and so are `adapter` and `progress`.

        Returns:
            One score per document.

        Raises:
            RequestError: As in `embed`, and for numbers of queries and documents that differ.
        """
        head = self._completer.job_builder.head
        passages = [documents] if isinstance(documents, str) else list(documents)
        queries = [query] * len(passages) if isinstance(query, str) else list(query)
        if len(queries) != len(passages):
            raise RequestError(
                f"there are {len(queries)} queries and {len(passages)} documents",
                at="query",
                fix="give one query, or one for each document",
            )
        tokenizer = self._completer.tokenizer
        if head is not None and head.task is Task.EMBED:
            texts = [
                *(_named(head, text, QUERY) for text in queries),
                *(_named(head, text, DOCUMENT) for text in passages),
            ]
            rows = self._rows([token_ids(text, tokenizer) for text in texts], truncate, progress, adapter)
            vectors = zip(rows[: len(passages)], rows[len(passages) :], strict=True)
            return [similarity(head, one, other) for one, other in vectors]
        head = self._head(Task.SCORE)
        pairs = [tokenizer.encode(_text(one), _text(other)) for one, other in zip(queries, passages, strict=True)]
        return [float(activated(head, row, activation)[0]) for row in self._rows(pairs, truncate, progress, adapter)]

    def classify(
        self,
        texts: Prompts,
        *,
        activation: bool = True,
        truncate: bool = False,
        adapter: str | None = None,
        progress: Progress = False,
    ) -> list[Classification]:
        """Compute how well the model's labels fit each text.

        Args:
            texts: A text or an iterable of texts, as in `generate`.
            activation: Whether to apply softmax or sigmoid, as the model's config says; otherwise values are logits.
            truncate: As in `embed`, and so are `adapter` and `progress`.

        Returns:
            One classification per text.

        Raises:
            RequestError: As in `embed`, for an engine that is not built with task=classify.
        """
        head = self._head(Task.CLASSIFY)
        rows = self._rows(token_sequences(texts, self._completer.tokenizer), truncate, progress, adapter)
        return [classification(head, row, activation) for row in rows]

    def _rows(
        self, texts: Sequence[list[int]], truncate: bool, progress: Progress, adapter: str | None
    ) -> Sequence[Row]:
        longest = self._completer.job_builder.longest_text
        read = [self._completer.tokenizer.cut(ids, longest) for ids in texts] if truncate else texts
        return self._completer.rows(read, progress, adapter)

    def _head(self, task: Task) -> Head:
        """Return the engine's head. Raises RequestError for an engine that was built for another task."""
        head = self._completer.job_builder.head
        check_task(head, wants_row=True)
        assert head is not None
        if head.task is not task:
            raise RequestError(
                f"the engine is built for {head.task.value}, not for {task.value}",
                fix=f"build another with task={task.value}, from a model that has such a head",
            )
        return head


def _named(head: Head, text: Any, names: Sequence[str]) -> Any:
    """Behind the prompt of its kind."""
    return prepared(head.preparation, text, known_prompt(head.preparation, names))


def _text(given: object) -> str:
    if not isinstance(given, str):
        raise RequestError(
            f"a score needs a pair of texts, and one is {given!r:.60} ({type(given).__name__})", fix="give str"
        )
    return given
