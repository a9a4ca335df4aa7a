"""The lowered step as data: what code generation writes into an engine and what the runtime runs."""

from llmc.program.adapter_pools import AdapterPools
from llmc.program.cache_policy import EVERYTHING, MAX_SLOTS, TREE_REACH, CachePolicy, Cut, Nearest, Progress, Visible
from llmc.program.compactor import Compactor
from llmc.program.compression import (
    Compression,
    check_cuts,
    check_newest,
    compression_problem,
    fitted_compression,
    newest_problem,
    parse_compression,
    unused_compression,
)
from llmc.program.device_kernel import LIBRARY, DeviceBinary, DeviceKernel, DeviceParameter
from llmc.program.h2o import H2O
from llmc.program.head import Activation, Head, Pooling, Task
from llmc.program.kvzip import KVzip
from llmc.program.limits import Limits
from llmc.program.lru import Lru
from llmc.program.program import (
    ITEMSIZES,
    LOOP,
    Affine,
    Alternative,
    Buffer,
    CacheSlot,
    Launch,
    Layout,
    Origin,
    Program,
    RowCount,
    RowRange,
    SideOutput,
    WeightSlot,
    code_rows_layout,
    step_row_bytes,
)
from llmc.program.rank_layout import RankLayout
from llmc.program.scored_compression import Scored
from llmc.program.snapkv import SnapKV
from llmc.program.state_slot import StateSlot, state_bytes
from llmc.program.step_outputs import (
    ADAPTERS,
    CHOICE_INPUTS,
    CHOICE_OUTPUTS,
    COMPACTION,
    COMPACTION_HEADER,
    GROUP_INPUTS,
    HIDDEN,
    LOGITS,
    ROW_ADAPTERS,
    STATE_SLOTS,
    STEP_INPUTS,
    WRITTEN,
    StepOutput,
    group_input,
    is_for,
)
from llmc.program.streaming import Streaming
from llmc.program.stride import Stride
from llmc.program.text_preparation import Similarity, TextPreparation, TextPrompt
from llmc.program.triattention import ChoosingHeads, TriAttention

__all__ = [
    "ADAPTERS",
    "CHOICE_INPUTS",
    "CHOICE_OUTPUTS",
    "COMPACTION",
    "COMPACTION_HEADER",
    "EVERYTHING",
    "GROUP_INPUTS",
    "H2O",
    "HIDDEN",
    "ITEMSIZES",
    "LIBRARY",
    "LOGITS",
    "LOOP",
    "MAX_SLOTS",
    "ROW_ADAPTERS",
    "STATE_SLOTS",
    "STEP_INPUTS",
    "TREE_REACH",
    "WRITTEN",
    "Activation",
    "AdapterPools",
    "Affine",
    "Alternative",
    "Buffer",
    "CachePolicy",
    "CacheSlot",
    "ChoosingHeads",
    "Compactor",
    "Compression",
    "Cut",
    "DeviceBinary",
    "DeviceKernel",
    "DeviceParameter",
    "Head",
    "KVzip",
    "Launch",
    "Layout",
    "Limits",
    "Lru",
    "Nearest",
    "Origin",
    "Pooling",
    "Program",
    "Progress",
    "RankLayout",
    "RowCount",
    "RowRange",
    "Scored",
    "SideOutput",
    "Similarity",
    "SnapKV",
    "StateSlot",
    "StepOutput",
    "Streaming",
    "Stride",
    "Task",
    "TextPreparation",
    "TextPrompt",
    "TriAttention",
    "Visible",
    "WeightSlot",
    "check_cuts",
    "check_newest",
    "code_rows_layout",
    "compression_problem",
    "fitted_compression",
    "group_input",
    "is_for",
    "newest_problem",
    "parse_compression",
    "state_bytes",
    "step_row_bytes",
    "unused_compression",
]
