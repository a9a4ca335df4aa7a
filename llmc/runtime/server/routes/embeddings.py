"""POST /v1/embeddings, /v1/rerank, /v1/score and /v1/classify, the last three also under vLLM's other paths."""

import base64
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from llmc.program import Head, Task
from llmc.runtime.head_rows import activated, classification, embedding, similarity
from llmc.runtime.requests.job_builder import check_task
from llmc.runtime.requests.request_output import Row
from llmc.runtime.server.computed_rows import ComputedRows, Json, framed, input_ids, read_texts, readable_text, rows_of
from llmc.runtime.server.errors import bad_request
from llmc.runtime.server.outputs import answer
from llmc.runtime.server.schemas.embeddings import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    RowFields,
    ScoreRequest,
)
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.text.prepared_text import DOCUMENT, QUERY, known_prompt, prepared


def embedding_routes(model: ServedModel) -> APIRouter:
    """The routes, for that model; an engine that is built for another task answers 400."""
    router = APIRouter(route_class=model.route_class)

    @router.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        return await answer(request, _embeddings(model, body, request))

    @router.post("/v1/classify", response_model=None)
    @router.post("/classify", response_model=None)
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        return await answer(request, _classify(model, body, request))

    @router.post("/v1/score", response_model=None)
    @router.post("/score", response_model=None)
    async def score(body: ScoreRequest, request: Request) -> Response:
        return await answer(request, _score(model, body, request))

    @router.post("/v1/rerank", response_model=None)
    @router.post("/v2/rerank", response_model=None)
    @router.post("/rerank", response_model=None)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        return await answer(request, _rerank(model, body, request))

    return router


def checked_head(model: ServedModel, body: RowFields, *tasks: Task) -> Head:
    """The engine's head. 404 for another model's name, 400 for an engine that is built for another task."""
    model.check_name(body.model)
    model.check_room()
    head = model.engine.engine.info.head
    check_task(head, wants_row=True)
    assert head is not None
    if head.task not in tasks:
        raise bad_request(f"the engine is built for {head.task.value}, not for {tasks[0].value}")
    return head


async def _embeddings(model: ServedModel, body: EmbeddingRequest, request: Request) -> Json:
    head = checked_head(model, body, Task.EMBED)
    if body.dimensions is not None and body.dimensions > head.width:
        raise bad_request(f"the vectors have {head.width} dimensions", "dimensions")
    prepare = partial(prepared, head.preparation, name=body.prompt_name)
    computed = await rows_of(model, body, request, await input_ids(model, body, body.input, prepare))
    vectors = [embedding(head, row, body.dimensions, body.normalize) for row in computed.rows]
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _encoded(vector) if body.encoding_format == "base64" else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
    return framed(model, body, request, "embd", computed, data=data)


def _encoded(vector: Row) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")


async def _classify(model: ServedModel, body: ClassifyRequest, request: Request) -> Json:
    head = checked_head(model, body, Task.CLASSIFY)
    computed = await rows_of(model, body, request, await input_ids(model, body, body.input))
    data = []
    for index, row in enumerate(computed.rows):
        result = classification(head, row, body.use_activation)
        scores = result.scores.tolist()
        data.append({"index": index, "label": result.label, "probs": scores, "num_classes": len(scores)})
    return framed(model, body, request, "classify", computed, data=data)


async def _score(model: ServedModel, body: ScoreRequest, request: Request) -> Json:
    documents = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    scores, computed = await _scores(model, body, request, body.text_1, documents, body.use_activation)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return framed(model, body, request, "score", computed, data=data)


async def _rerank(model: ServedModel, body: RerankRequest, request: Request) -> Json:
    scores, computed = await _scores(model, body, request, body.query, body.documents, body.use_activation)
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    results = []
    for index in order[: body.top_n]:
        document = {"document": {"text": body.documents[index]}} if body.return_documents else {}
        results.append({"index": index, **document, "relevance_score": scores[index]})
    return framed(model, body, request, "rerank", computed, results=results)


async def _scores(
    model: ServedModel,
    body: RowFields,
    request: Request,
    query: str | list[str],
    documents: list[str],
    activation: bool,
) -> tuple[list[float], ComputedRows]:
    """Scores of pairs that a scorer reads together, or similarities of an embedder's vectors.

    query: one for all documents, which is tokenized once, or one for each.
    """
    head = checked_head(model, body, Task.SCORE, Task.EMBED)
    queries = [query] if isinstance(query, str) else query
    if not isinstance(query, str) and len(queries) != len(documents):
        raise bad_request(f"there are {len(queries)} text_1 and {len(documents)} text_2", "text_1")
    # Whether the query at a document's place is the only one.
    place = (lambda index: 0) if isinstance(query, str) else (lambda index: index)
    if head.task is Task.EMBED:
        texts = []
        for part, names in ((queries, QUERY), (documents, DOCUMENT)):
            prepare = partial(prepared, head.preparation, name=known_prompt(head.preparation, names))
            texts += await input_ids(model, body, part, prepare)
        computed = await rows_of(model, body, request, texts)
        of_queries, of_documents = computed.rows[: len(queries)], computed.rows[len(queries) :]
        return [similarity(head, of_queries[place(i)], row) for i, row in enumerate(of_documents)], computed
    tokenizer = model.engine.engine.tokenizer
    readable = [readable_text(model, body, text) for text in queries]
    if isinstance(query, str):
        pairs = await read_texts(model, body, documents, tokenizer.pair_encoder(readable[0]))
    else:
        each_query = iter(readable)
        pairs = await read_texts(model, body, documents, lambda document: tokenizer.encode(next(each_query), document))
    computed = await rows_of(model, body, request, pairs)
    return [float(activated(head, row, activation)[0]) for row in computed.rows], computed
