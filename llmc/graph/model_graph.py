"""The graph that passes hand to each other: an fx.Graph, its stage, and where its weights come from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import fx

from llmc.formats.cache_format import CacheFormats
from llmc.formats.pruned_part import PrunedPart
from llmc.formats.quantized_weight import QuantizedWeight
from llmc.formats.sparse_weight import SparseWeight
from llmc.graph.draft_records import Combination, MedusaCheckpoint, Method, Target
from llmc.graph.dtype_names import DTYPE_NAMES
from llmc.graph.fake_value import FakeValues
from llmc.graph.stage import Stage
from llmc.graph.weights import Recipe, ShapedSource
from llmc.program import AdapterPools, CachePolicy, CacheSlot, Head


@dataclass(frozen=True)
class ModelInfo:
    """Facts about the model that the engine needs and the graph does not hold.

    family: the HF model_type, or "module". max_positions: the longest context in tokens that the model was made for,
    None if it has no limit. dtype: the dtype of weights and activations. head: what the model returns for a text; None
    if it returns logits.
    """

    name: str
    family: str
    vocab_size: int
    max_positions: int | None
    dtype: torch.dtype
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    head: Head | None = None

    @property
    def row_width(self) -> int:
        """Columns of the graph's result: the vocabulary size, or the width of the head."""
        return self.vocab_size if self.head is None else self.head.width


@dataclass(frozen=True)
class CacheSpec:
    """The paged KV cache of one attention layer. format: the format of codes, in caches of dtype uint8. group: see
    CacheSlot."""

    layer: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    format: CacheFormats | None = None
    group: int = 0

    def width(self, part: str) -> int:
        """Elements of one head at one position. part: "k" or "v"."""
        channels = self.head_dim if part == "k" else self.value_dim
        return channels if self.format is None else self.format.of(part).position_bytes(channels)

    def slot(self) -> CacheSlot:
        """The cache as a program records it."""
        format = None if self.format is None else str(self.format)
        return CacheSlot(self.kv_heads, self.head_dim, self.value_dim, DTYPE_NAMES[self.dtype], format, self.group)


@dataclass(frozen=True)
class StateSpec:
    """State that an op carries from token to token, in fp32. shape: for one sequence."""

    index: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class AttachedDraft:
    """Layers that draft from a model's hidden states, as a separate graph. method: the drafter that runs it.
    id_offsets: what is to be added to its own token ids for the model's; None if they are the same."""

    graph: ModelGraph
    method: str
    id_offsets: Recipe | None


class DraftCheckpoint(Protocol):
    """A draft's directory, opened: its config and the headers of its weights."""

    @property
    def method(self) -> Method:
        """The drafter that its engines are for."""

    @property
    def source(self) -> ShapedSource:
        """The source of the draft's tensors, by the names that recipes have after PREFIX."""

    def taps(self, layers: int, width: int) -> tuple[int, ...] | None:
        """The layers of the target whose inputs the drafter reads; `layers` is the output of the last. None: it reads
        the input of the output matrix. Raises CheckpointError if the checkpoint belongs to another model."""

    def notes(self, layers: int) -> tuple[str, ...]:
        """Notes for the build."""

    def combination(self, target: Target) -> Combination | None:
        """Return how several tapped states become one; None for a single state. Raises CheckpointError."""

    def graphs(self, target: Target, info: ModelInfo) -> tuple[AttachedDraft, ...]:
        """The layers that draft: the first reads the target's hidden states, each further one those of the one before.

        info: the info of the target. Raises CheckpointError for layers of another model, CaptureError.
        """


@dataclass(frozen=True)
class Adaptable:
    """A linear layer that adapters may change. name: the tail of its module's name (adapters/module_name.py)."""

    name: str
    inputs: int
    outputs: int


@dataclass
class ModelGraph:
    """A graph at a stage. Passes change it in place; `copy` gives an independent one.

    A placeholder whose name is a key of `weights` is a weight, made by its recipe. All others are step inputs, in
    order. Input names at the stages captured and canonical: input_ids, positions; at serving and later also
    slot_mapping, query_starts, context_lens, block_tables, logit_rows, tree_masks, for each of `policies` its `inputs`
    (group_input), and for each entry i of `caches` kv_cache_{i}_k and kv_cache_{i}_v; where there are `states` also
    state_slots and, for each entry i of them, state_{i}; after insert_adapters also adapter_of_token and the pools of
    `adapters`.
    ranks: number of processes that run the graph together, each with its own weights and caches, connected by
    collectives. Shapes are per rank.
    pipeline_stages: number of consecutive stages on their own ranks, split at llmc::hand_over. pipeline_stage: the
    index of this graph's stage; None for all in one. Every node's meta["val"] is a FakeTensor (or SymInt) with the
    symbolic token count T.
    policies: those of cache groups 1 and up; the layers of group 0 keep everything. exact_rows: number of newest rows
    of tables that are cut which attention, in any stage, reads from other caches.
    quantized, sparse: what became of each weight that has codes, or zeros. pruned: what each part lost.
    side_outputs: names of the results after the logits, in order. speculative: the checkpoint of the drafter, if any;
    draft: its form after attach_draft.
    adaptable: layers that adapters may change at run time; adapters: their pools after insert_adapters.
    fakes: makes fake values, cached for all copies.
    """

    graph: fx.Graph
    stage: Stage
    weights: dict[str, Recipe]
    info: ModelInfo
    caches: tuple[CacheSpec, ...] = ()
    policies: tuple[CachePolicy, ...] = ()
    exact_rows: int = 0
    states: tuple[StateSpec, ...] = ()
    quantized: tuple[QuantizedWeight, ...] = ()
    sparse: tuple[SparseWeight, ...] = ()
    pruned: tuple[PrunedPart, ...] = ()
    side_outputs: tuple[str, ...] = ()
    speculative: DraftCheckpoint | None = None
    medusa: MedusaCheckpoint | None = None
    draft: AttachedDraft | None = None
    adaptable: tuple[Adaptable, ...] = ()
    adapters: AdapterPools | None = None
    ranks: int = 1
    pipeline_stages: int = 1
    pipeline_stage: int | None = None
    fakes: FakeValues = field(default_factory=FakeValues, repr=False, compare=False)

    def inputs(self) -> tuple[fx.Node, ...]:
        """The step inputs, in placeholder order."""
        return tuple(n for n in self.graph.find_nodes(op="placeholder") if n.name not in self.weights)

    def weight_nodes(self) -> tuple[fx.Node, ...]:
        """The weight placeholders, in placeholder order."""
        return tuple(n for n in self.graph.find_nodes(op="placeholder") if n.name in self.weights)

    def copy(self) -> ModelGraph:
        """A graph with its own nodes; recipes and fake values are shared, since nothing changes them."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        output = graph.graph_copy(self.graph, mapping)
        if output is not None:
            graph.output(output)
        return replace(self, graph=graph, weights=dict(self.weights))

    @property
    def hands_over(self) -> bool:
        """Whether it is a stage before the last one, which returns rows for the next in the place of logits."""
        return self.pipeline_stage is not None and self.pipeline_stage < self.pipeline_stages - 1

    def logits(self) -> fx.Node:
        """The first result of the graph."""
        return self.returned()[0]

    def sides(self) -> dict[str, fx.Node]:
        """The results after the logits, by name."""
        return dict(zip(self.side_outputs, self.returned()[1:], strict=True))

    def add_side_output(self, name: str, node: fx.Node) -> None:
        """Return one more tensor."""
        self.graph.output_node().args = ((*self.returned(), node),)
        self.side_outputs += (name,)

    def returned(self) -> tuple[fx.Node, ...]:
        """All values that the graph returns, in order; a node may occur twice."""
        (result,) = self.graph.output_node().args
        nodes: Any = (result,) if isinstance(result, fx.Node) else result
        return tuple(nodes)
