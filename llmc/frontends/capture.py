"""Capture: any way of giving a decoder language model becomes one graph at stage captured, and a source of weights."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from llmc.frontends.adapters.adaptable_layers import adaptable_layers
from llmc.frontends.adapters.merge_adapter import merge_adapters
from llmc.frontends.captured import Captured, Model, checked_tokenizer_files
from llmc.frontends.checkpoints.joined_source import joined
from llmc.frontends.drafts.open_draft import draft_of_model
from llmc.frontends.front_end import OpenedModel
from llmc.frontends.open_model import open_model
from llmc.graph.draft_records import PREFIX, MedusaCheckpoint
from llmc.options import BuildOptions


def capture(model: Model | OpenedModel[Any], options: BuildOptions, *, may_lack_weights: bool = False) -> Captured:
    """Capture a model from whatever it comes: front_ends.py lists the kinds.

    The graph takes input_ids and positions, both [1, T] int64, and returns logits [1, T, vocab]; T is symbolic.
    Weight data is not read. may_lack_weights: a directory may hold only config.json; its weights then cannot be read
    later. With options.speculative the drafter's checkpoint is also opened; with options.lora adapters are merged into
    the recipes. Raises CheckpointError for a broken directory, CaptureError for a model that cannot be traced or is not
    a decoder language model.
    """
    opened = open_model(model)
    # Before the model, which takes longer.
    draft = None if options.speculative is None else draft_of_model(opened, options.speculative)
    with _without_garbage_collection():
        files = () if opened.directory is None else checked_tokenizer_files(opened.directory)
        captured = opened.front_end.capture(opened, options, may_lack_weights)
    captured = replace(captured, tokenizer_files=files)
    if options.enable_lora:
        captured = replace(captured, graph=replace(captured.graph, adaptable=adaptable_layers(captured.graph)))
    if options.lora:
        captured = replace(captured, graph=merge_adapters(captured.graph, options.adapters))
    if draft is None:
        return captured
    if isinstance(draft, MedusaCheckpoint):
        graph = replace(captured.graph, medusa=draft)
    else:
        graph = replace(captured.graph, speculative=draft)
    return replace(captured, graph=graph, source=joined(captured.source, draft.source, PREFIX))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the cycle collector: importing transformers and tracing make a million objects that stay, and walking
    them again and again took a quarter of the time (3.4 s for 4.4 s of a 6-layer model, imports included)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
