"""The lowered step as data: what program.json holds. Codegen writes it, the runtime and the reports read it.

A step's tensors are matrices of rows: T tokens, L requested logit rows, or a constant number of them.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import Enum

from llmc.errors import EngineFormatError
from llmc.files.typed_json import LEFT_OUT
from llmc.formats.cache_format import parse_cache_formats
from llmc.formats.code_format import CODE_FORMATS
from llmc.program.adapter_pools import AdapterPools
from llmc.program.cache_policy import EVERYTHING, CachePolicy, group_blocks
from llmc.program.device_kernel import DeviceKernel
from llmc.program.launch_arguments import Argument, Count, Operand
from llmc.program.limits import Limits
from llmc.program.rank_layout import RankLayout
from llmc.program.state_slot import StateSlot
from llmc.program.step_outputs import COMPACTION, StepOutput, is_for

# Bytes per element of each dtype, by its name in safetensors.
ITEMSIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


class RowCount(Enum):
    """The number of rows of a buffer in a step: one per token, one per requested logit row, or a single one."""

    TOKENS = "T"
    LOGIT_ROWS = "L"
    ONE = "1"

    @property
    def count(self) -> Count | int:
        """The count as an argument of a launch."""
        return 1 if self is RowCount.ONE else Count(self.value)


class Layout(Enum):
    """How a weight lies in the file.

    ROWS: row-major, as in the checkpoint. PANELS: for linear, lm_head and embedding (kernels/api.h).
    GATED_PANELS: the same with gate and up rows side by side. CODE_PANELS, GATED_CODE_PANELS: the same for quantized
    weights, scales and zeros included. SPARSE_PANELS, GATED_SPARSE_PANELS, SPARSE_CODE_PANELS,
    GATED_SPARSE_CODE_PANELS: the same without the elements that are zero. CODE_ROWS, CODE_PAIR_ROWS: row-major codes of
    a quantized weight alone, a byte each or two in a byte; CODE_2_ROWS, CODE_3_ROWS, CODE_5_ROWS, CODE_6_ROWS: their
    low two or four bits so, the higher bits after them; STEP_ROWS: the steps of its scales and minima, in their bits
    (codegen/triton/code_rows.py). MASK_ROWS, MASK_STARTS: for a weight without its zeros, the places of its elements,
    and the number of each row's first element; the elements are ROWS (codegen/triton/mask_rows.py). VECTOR_F32: a
    vector widened to fp32. NIBBLES: codes of four bits in their order, two in a byte, the first in its low half.
    """

    ROWS = "rows"
    PANELS = "panels"
    GATED_PANELS = "gated_panels"
    CODE_PANELS = "code_panels"
    GATED_CODE_PANELS = "gated_code_panels"
    SPARSE_PANELS = "sparse_panels"
    GATED_SPARSE_PANELS = "gated_sparse_panels"
    SPARSE_CODE_PANELS = "sparse_code_panels"
    GATED_SPARSE_CODE_PANELS = "gated_sparse_code_panels"
    CODE_ROWS = "code_rows"
    CODE_PAIR_ROWS = "code_pair_rows"
    CODE_2_ROWS = "code_2_rows"
    CODE_3_ROWS = "code_3_rows"
    CODE_5_ROWS = "code_5_rows"
    CODE_6_ROWS = "code_6_rows"
    STEP_ROWS = "step_rows"
    MASK_ROWS = "mask_rows"
    MASK_STARTS = "mask_starts"
    VECTOR_F32 = "vector_f32"
    NIBBLES = "nibbles"

    @property
    def is_sparse(self) -> bool:
        """Whether its size follows from the numbers, and not only from the shape."""
        return "sparse" in self.value

    @property
    def code_bits(self) -> int | None:
        """Bits of a code for row-major codes; None for other layouts."""
        return _CODE_BITS.get(self)


_CODE_BITS = {
    Layout.CODE_ROWS: 8,
    Layout.CODE_PAIR_ROWS: 4,
    Layout.CODE_2_ROWS: 2,
    Layout.CODE_3_ROWS: 3,
    Layout.CODE_5_ROWS: 5,
    Layout.CODE_6_ROWS: 6,
}


def code_rows_layout(format: str) -> Layout:
    """The layout of row-major codes of a format (llmc/formats/code_format.py)."""
    return next(layout for layout, bits in _CODE_BITS.items() if bits == CODE_FORMATS[format].bits)


def step_row_bytes(groups: int, format: str) -> int:
    """Bytes of a row with the steps of `groups` groups' scales and minima in STEP_ROWS."""
    return -(-groups * CODE_FORMATS[format].step_field_bits // 8)


@dataclass(frozen=True)
class Affine:
    """A byte count `constant + tokens·T + logit_rows·L`."""

    constant: int = 0
    tokens: int = 0
    logit_rows: int = 0

    def __add__(self, other: "Affine") -> "Affine":
        return Affine(self.constant + other.constant, self.tokens + other.tokens, self.logit_rows + other.logit_rows)

    def at(self, *, tokens: int, logit_rows: int) -> int:
        """The value for T tokens and L logit rows."""
        return self.constant + self.tokens * tokens + self.logit_rows * logit_rows


@dataclass(frozen=True)
class Buffer:
    """An intermediate in the arena: rows × columns elements, row-major, at byte `offset`.

    dtype: a safetensors name (F32, BF16, F16, I32; of a node's own workspace also I8, U8).
    """

    name: str
    dtype: str
    rows: RowCount
    columns: int
    offset: Affine
    first_launch: int
    last_launch: int


@dataclass(frozen=True)
class WeightSlot:
    """One weight pointer handed to the engine: `name` in weights/*.safetensors, `shape` as in the graph.

    nbytes: bytes of the stored tensor in `layout`, padding included.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout
    nbytes: int


@dataclass(frozen=True)
class CacheSlot:
    """One layer's pair of cache pointers: each [blocks, kv_heads, block_size, head_dim or value_dim].

    format: the code formats (formats/cache_format.py) if the caches hold codes with scales instead of numbers; the
    dtype is then U8. group: the cache group, whose blocks and tables it uses: 0 for a layer that keeps everything,
    otherwise one more than the index of its policy in Program.policies.
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    format: str | None = None
    group: int = field(default=0, metadata=LEFT_OUT)

    def widths(self) -> tuple[int, int]:
        """Elements of one head at one position, of keys and of values."""
        if self.format is None:
            return self.head_dim, self.value_dim
        formats = parse_cache_formats(self.format)
        return formats.keys.position_bytes(self.head_dim), formats.values.position_bytes(self.value_dim)

    def key_and_value_bytes(self, block_size: int) -> tuple[int, int]:
        """Bytes of the keys and of the values of one block of this layer."""
        row = self.kv_heads * block_size * ITEMSIZES[self.dtype]
        keys, values = self.widths()
        return row * keys, row * values

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of keys and values of one block of this layer."""
        return sum(self.key_and_value_bytes(block_size))


@dataclass(frozen=True)
class Origin:
    """Where a launch comes from: graph nodes, the last rewrite that made it, and the model's source line."""

    nodes: tuple[str, ...]
    rewrite: str | None
    source: str | None


# The family of kernels that are generated from a graph's pointwise work.
LOOP = "loop"


@dataclass(frozen=True)
class RowRange:
    """Steps in which a count (T or L) is at least `first` and at most `last`; None for no limit."""

    rows: RowCount
    first: int
    last: int | None

    def holds(self, *, tokens: int, logit_rows: int) -> bool:
        """Whether a step of T tokens and L logit rows is one of them."""
        count = {RowCount.TOKENS: tokens, RowCount.LOGIT_ROWS: logit_rows, RowCount.ONE: 1}[self.rows]
        return self.first <= count and (self.last is None or count <= self.last)


@dataclass(frozen=True)
class Launch:
    """One kernel call.

    kernel: on a CPU a function (kernels/api.h, or a loop of the engine's), on a GPU the name of a DeviceKernel. family:
    the function without its element types, LOOP for a generated one. dtypes: the dtypes of the elements that it is for,
    by their names in safetensors; for a cache of codes, the name of the codes' format (llmc/formats/cache_format.py).
    arguments: the fields of the kernel's struct or the parameters of the DeviceKernel; rows, p0, p1, … of a loop. grid:
    the grid of a GPU launch, one to three expressions (launch_grid.py); empty on a CPU. only: the steps that the launch
    runs in; None is all of them. wanted: what those are to give; empty for anything. sides: it runs only in steps that
    need one of these side outputs or, of ADAPTERS, in which a token has an adapter; empty for all. unless: and in none
    that needs one of these. bytes_moved and flops are sympy expressions over the symbols of graph/cost.py, as text
    (prediction/cost_expression.py). seconds: predicted with all that tiling adds, together with the launches that
    follow for the same node, at the maximum rows of `only`; None if bytes and operations determine it.
    """

    kernel: str
    family: str
    dtypes: tuple[str, ...]
    arguments: dict[str, Argument]
    origin: Origin
    bytes_moved: str
    flops: str
    grid: tuple[str, ...] = ()
    only: RowRange | None = None
    wanted: tuple[StepOutput, ...] = ()
    sides: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    seconds: float | None = None

    def number(self, name: str) -> int:
        """Return the value of an argument. Raises EngineFormatError if it is not a whole number."""
        value = self.arguments.get(name)
        if not isinstance(value, int):
            raise EngineFormatError(
                f"a launch of {self.kernel} passes {value!r} as {name}, which is not a whole number"
            )
        return value

    def runs(
        self,
        *,
        tokens: int,
        logit_rows: int,
        wanted: StepOutput = StepOutput.LOGITS,
        sides: Collection[str] = (),
    ) -> bool:
        """Whether a step of T tokens and L logit rows has the launch. sides: the side outputs that it needs."""
        if self.compacts or (self.wanted and wanted not in self.wanted) or not is_for(self.sides, self.unless, sides):
            return False
        return self.only is None or self.only.holds(tokens=tokens, logit_rows=logit_rows)

    @property
    def compacts(self) -> bool:
        """Whether the launch is for steps with a compaction (llmc/ops/compact_kv.py), which have no others."""
        return any(isinstance(value, Operand) and value.name == COMPACTION for value in self.arguments.values())


@dataclass(frozen=True)
class Alternative:
    """Launches that do what launches[first] to launches[last], both included, do, in the same steps; predicted slower.

    buffers: those that only alternatives use, without places in the arena.
    """

    first: int
    last: int
    launches: tuple[Launch, ...]
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True)
class SideOutput:
    """An optional result of a step in addition to the logits, valid until the next step: a tensor of this shape per
    row.

    buffer: in whose memory; None if the graph itself runs.
    """

    name: str
    dtype: str
    rows: RowCount
    shape: tuple[int, ...]
    buffer: str | None

    @property
    def columns(self) -> int:
        """The number of elements of a row."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Program:
    """Everything that an executor needs except the weights' data.

    vocab_size: columns of the row in fp32 that a step gives for each logit row: logits, or what a head makes of a text.
    hidden_width: columns of the step input `hidden` (HIDDEN), of drafts and of stages that follow another; 0 for none.
    layout: that of the engine's ranks; those of one stage run the program together. stage: which one it is. hands_over:
    columns of each token's row in fp32 for the next stage; 0 where a step gives logits. adapters: where they go; None
    for an engine that takes none. states: what its ops carry from token to token. policies: those of the groups of
    caches after the first. exact_rows: number of newest rows that no cut may drop, as a stage reads them elsewhere.
    """

    limits: Limits
    vocab_size: int
    arena: Affine
    unplanned_arena: Affine
    buffers: tuple[Buffer, ...]
    weights: tuple[WeightSlot, ...]
    caches: tuple[CacheSlot, ...]
    launches: tuple[Launch, ...] = field(default=())
    kernels: tuple[DeviceKernel, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    side_outputs: tuple[SideOutput, ...] = ()
    hidden_width: int = 0
    layout: RankLayout = field(default=RankLayout())
    stage: int = 0
    hands_over: int = 0
    adapters: AdapterPools | None = None
    states: tuple[StateSlot, ...] = ()
    policies: tuple[CachePolicy, ...] = field(default=(), metadata=LEFT_OUT)
    exact_rows: int = field(default=0, metadata=LEFT_OUT)

    @property
    def ranks(self) -> int:
        """Processes that run the program together."""
        return self.layout.tensor

    def group_blocks(self, blocks: int) -> tuple[int, ...]:
        """Return the number of blocks of each group, given those of the first, which holds whole sequences."""
        return group_blocks(self.policies, self.limits, blocks, has_first=any(not cache.group for cache in self.caches))

    def token_bytes(self) -> tuple[int, ...]:
        """Keys and values of a token in the layers of each group of caches."""
        size, totals = self.limits.block_size, [0] * (1 + len(self.policies))
        for cache in self.caches:
            totals[cache.group] += cache.bytes_per_block(size)
        return tuple(total // size for total in totals)

    def block_bytes(self) -> tuple[int, ...]:
        """Keys and values of a block in the layers of each group of caches."""
        sizes, count = self.memories(1), self.group_blocks(1)
        return tuple(sum(sizes[name] // blocks for name in self.caches_of(group)) for group, blocks in enumerate(count))

    def memories(self, blocks: int, spare: int = 0) -> dict[str, int]:
        """Bytes of each of cache_names with group_blocks(blocks). spare: how many more each group has."""
        counts, size = self.group_blocks(blocks), self.limits.block_size
        return {
            f"{layer}.{part}": (counts[cache.group] + spare) * nbytes
            for layer, cache in enumerate(self.caches)
            for part, nbytes in zip("kv", cache.key_and_value_bytes(size), strict=True)
        }

    def caches_of(self, group: int) -> dict[str, CacheSlot]:
        """The entries of cache_names in this cache group."""
        has_one_table = all(policy == EVERYTHING for policy in self.policies)
        return {name: slot for name, slot in self.cache_names().items() if has_one_table or slot.group == group}

    def with_one_table(self) -> "Program":
        """The program with the same number of blocks in each group, so that the tables of group 0 serve all."""
        return replace(self, policies=(EVERYTHING,) * len(self.policies))

    def cache_names(self) -> dict[str, CacheSlot]:
        """The names of each layer's keys and values in operands, in the order in which engines receive them."""
        return {f"{layer}.{part}": slot for layer, slot in enumerate(self.caches) for part in "kv"}

    def state_names(self) -> dict[str, StateSlot]:
        """The names of the states in operands."""
        return {str(index): slot for index, slot in enumerate(self.states)}

    def launched_kernels(self) -> tuple[DeviceKernel, ...]:
        """The kernels that steps launch from binaries, except those of libraries or of unused alternatives."""
        used = {launch.kernel for launch in self.launches}
        return tuple(kernel for kernel in self.kernels if kernel.name in used and not kernel.is_library)
