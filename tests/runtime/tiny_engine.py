"""A one-layer model as a reference engine, made by hand: real parts all the way, without capture, passes or codegen."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, fx

import llmc.ops  # noqa: F401  (registers torch.ops.llmc)
from llmc.engine_format import Manifest, ModelRecord, TargetRecord
from llmc.engine_format.writer import EngineWriter
from llmc.graph.model_graph import CacheSpec, ModelGraph, ModelInfo
from llmc.graph.serialize import serialize_graph
from llmc.graph.stage import Stage
from llmc.graph.weights import Constant
from llmc.ops.attention import attend
from llmc.program import HIDDEN, STEP_INPUTS, Affine, CacheSlot, Layout, Limits, Program, WeightSlot
from llmc.program.program_interface import memory_text
from llmc.program.program_json import program_to_json
from llmc.targets import REFERENCE

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 97, 16, 4, 2, 4
LIMITS = Limits(max_batch_tokens=16, max_sequences=4, max_logit_rows=6, max_model_len=40, block_size=8)
TOKENIZER = Path(__file__).parent.parent.parent / "examples/models/bard-6m/tokenizer.json"


@dataclass(frozen=True)
class TinyModel:
    """Weights of the model, and the model itself in plain torch: the oracle."""

    weights: dict[str, Tensor]

    def logits(self, tokens: list[int]) -> Tensor:
        """Logits [tokens, VOCAB] of a whole sequence."""
        w = self.weights
        x = w["embedding"][torch.tensor(tokens)] + w["places"][: len(tokens)]
        q = (x @ w["q"].T).view(-1, HEADS, HEAD_DIM)
        k, v = ((x @ w[name].T).view(-1, KV_HEADS, HEAD_DIM) for name in ("k", "v"))
        return (x + attend(q, k, v, 0, 0.5, None, None, None).flatten(1)) @ w["head"].T

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """The next `count` tokens."""
        tokens = list(tokens)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[-count:]


def tiny_model(seed: int = 0, vocab: int = VOCAB) -> TinyModel:
    """Random weights, wide enough apart that greedy choices are not ties."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embedding": (vocab, WIDTH),
        "places": (LIMITS.max_model_len, WIDTH),
        "q": (HEADS * HEAD_DIM, WIDTH),
        "k": (KV_HEADS * HEAD_DIM, WIDTH),
        "v": (KV_HEADS * HEAD_DIM, WIDTH),
        "head": (vocab, WIDTH),
    }
    return TinyModel({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})


def mild_model(seed: int = 0, vocab: int = VOCAB) -> TinyModel:
    """The tiny model with its logits scaled down, so that draws and beams have a choice."""
    model = tiny_model(seed, vocab)
    model.weights["head"] = model.weights["head"] * 0.15
    return model


def tiny_graph(model: TinyModel) -> ModelGraph:
    """The model at the stage "optimized"."""
    op, aten = torch.ops.llmc, torch.ops.aten
    graph = fx.Graph()
    n = {
        name: graph.placeholder(name)
        for name in (*(n for n in STEP_INPUTS if n != HIDDEN), "kv_cache_0_k", "kv_cache_0_v", *model.weights)
    }
    call = graph.call_function
    words = call(op.embedding.default, (n["input_ids"], n["embedding"]))
    places = call(op.embedding.default, (n["positions"], n["places"]))
    x = call(aten.add.Tensor, (words, places))
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    q, k, v = (
        call(aten.reshape.default, (call(op.linear.default, (x, n[part])), [-1, count, HEAD_DIM]))
        for part, count in heads.items()
    )
    call(op.kv_write.default, (k, v, n["kv_cache_0_k"], n["kv_cache_0_v"], n["slot_mapping"]))
    tables = (n["query_starts"], n["context_lens"], n["block_tables"])
    seen = call(
        op.paged_attention.default,
        (q, n["kv_cache_0_k"], n["kv_cache_0_v"], *tables, 0.5),
        {"tree_masks": n["tree_masks"]},
    )
    total = call(aten.add.Tensor, (x, call(aten.reshape.default, (seen, [-1, HEADS * HEAD_DIM]))))
    rows = call(op.select_rows.default, (total, n["logit_rows"]))
    graph.output(call(op.lm_head.default, (rows, n["head"])))
    recipes = {name: Constant(value) for name, value in model.weights.items()}
    info = ModelInfo("tiny", "module", len(model.weights["head"]), None, torch.float32)
    caches = (CacheSpec(0, KV_HEADS, HEAD_DIM, HEAD_DIM, torch.float32),)
    return ModelGraph(graph, Stage.OPTIMIZED, dict(recipes), info, caches)


def tiny_program(model: TinyModel, limits: Limits = LIMITS) -> Program:
    """Its program for the reference target."""
    weights = tuple(
        WeightSlot(name, "F32", tuple(value.shape), Layout.ROWS, value.nbytes) for name, value in model.weights.items()
    )
    caches = (CacheSlot(KV_HEADS, HEAD_DIM, HEAD_DIM, "F32"),)
    return Program(limits, len(model.weights["head"]), Affine(), Affine(), (), weights, caches)


def tiny_manifest(model: TinyModel, limits: Limits = LIMITS, eos: tuple[int, ...] = ()) -> Manifest:
    """Its manifest."""
    vocab = len(model.weights["head"])
    return Manifest(
        llmc_version="0",
        model=ModelRecord("tiny", "module", vocab, None, "float32", None, eos, 1),
        target=TargetRecord.of(REFERENCE),
        options={"block_size": limits.block_size},
        limits=limits,
        cost={"decode_bytes": 1.5},
        memory={"arena": 0},
        passes=(),
    )


def write_tiny_engine(
    path: Path,
    *,
    model: TinyModel | None = None,
    limits: Limits = LIMITS,
    eos: tuple[int, ...] = (),
    with_tokenizer: bool = False,
    tokenizer: Path = TOKENIZER,
    chat_template: str | None = None,
) -> Path:
    """Write the engine; with_tokenizer takes the shipped model's, whose vocabulary is 4096."""
    model = model or tiny_model(vocab=4096 if with_tokenizer else VOCAB)
    program = tiny_program(model, limits)
    with EngineWriter(path) as writer:
        writer.write_text("program.json", program_to_json(program))
        writer.write_text("graph.json", serialize_graph(tiny_graph(model), memory=memory_text(program)))
        writer.write_weights([(slot, partial(model.weights.__getitem__, slot.name)) for slot in program.weights])
        if with_tokenizer:
            writer.copy_file("tokenizer/tokenizer.json", tokenizer)
        if chat_template is not None:
            writer.write_text("tokenizer/chat_template.jinja", chat_template)
        writer.finish(tiny_manifest(model, limits, eos))
    return path


def copied(source: Path, destination: Path) -> Path:
    """A copy of an engine that a test may damage."""
    shutil.copytree(source, destination)
    return destination
