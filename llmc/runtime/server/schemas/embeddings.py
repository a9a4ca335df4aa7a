"""The bodies of POST /v1/embeddings (OpenAI's), /v1/rerank (Jina's, Cohere's), /v1/score and /v1/classify (vLLM's)."""

from typing import Annotated, Literal

from pydantic import Field

from llmc.runtime.server.schemas.completion import TokenIds
from llmc.runtime.server.schemas.fields import Fields

MAX_TEXTS = 2048
_Text = Annotated[str, Field(min_length=1)]
_Texts = Annotated[list[_Text], Field(min_length=1, max_length=MAX_TEXTS)]
_Input = _Text | TokenIds | _Texts | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS)]


class RowFields(Fields, extra="forbid", populate_by_name=True):
    """Fields of all requests for rows of texts.

    truncate_prompt_tokens: maximum number of a text's tokens to read, -1 for the engine's limit; without it, a
    longer text is an error. truncation_side: the end to cut.
    """

    model: str | None = Field(default=None, max_length=1000)
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=2**31)
    truncation_side: Literal["left", "right"] = "right"
    add_special_tokens: bool = True
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    deadline_seconds: float | None = Field(default=None, gt=0.0, le=86_400.0)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    user: str | None = None


class EmbeddingRequest(RowFields):
    """The body of /v1/embeddings.

    input: a text, several, token ids, or several lists of them. base64: the encoding of the numbers as little-endian
    fp32. prompt_name: the name of the prompt before each text, as in sentence-transformers.
    """

    input: _Input
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    normalize: bool | None = None
    prompt_name: str | None = Field(default=None, max_length=256)


class ClassifyRequest(RowFields):
    """The body of /v1/classify. use_activation: return probabilities instead of logits."""

    input: _Input
    use_activation: bool = True


class ScoreRequest(RowFields):
    """The body of /v1/score. text_1: a query, or one for each text_2."""

    text_1: _Text | _Texts
    text_2: _Text | _Texts
    use_activation: bool = True


class RerankRequest(RowFields):
    """The body of /v1/rerank. top_n: The number of documents to return, the best first. Default: all."""

    query: _Text
    documents: _Texts
    top_n: int | None = Field(default=None, ge=0)
    return_documents: bool = True
    use_activation: bool = True
