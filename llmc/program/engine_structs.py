"""The structs that the runtime hands to a CPU engine's library, which is compiled to take exactly these.

codegen/cpp/kernels/api.h documents their fields.
"""

from ctypes import CFUNCTYPE, POINTER, Structure, c_int32, c_int64, c_void_p, sizeof

from llmc.program.step_outputs import ADAPTERS, CHOICE_INPUTS, COMPACTION, HIDDEN, ROW_ADAPTERS, STATE_SLOTS


class LlmcStep(Structure):
    """One step's inputs and where its logits go."""

    _fields_ = (
        *((name, c_int32) for name in ("tokens", "requests", "logit_rows", "max_blocks")),
        *((name, c_void_p) for name in ("input_ids", "positions", "slot_mapping", "query_starts")),
        *((name, c_void_p) for name in ("context_lens", "block_tables", "logit_row_ids", "tree_masks", "logits")),
        ("sides", c_int64),
        (HIDDEN, c_void_p),
        *((name, c_void_p) for name in (ADAPTERS, ROW_ADAPTERS)),
        (STATE_SLOTS, c_void_p),
        (COMPACTION, c_void_p),
    )


Exchange = CFUNCTYPE(c_int32, c_void_p, c_int64, c_int64)


class LlmcRanks(Structure):
    """One of several processes that run an engine together."""

    _fields_ = (
        ("rank", c_int32),
        ("ranks", c_int32),
        ("memory", c_void_p),
        ("round", c_int64),
        ("exchange", Exchange),
    )


class LlmcBindings(Structure):
    """The memory that an engine is opened with."""

    _fields_ = (
        ("weights", POINTER(c_void_p)),
        ("caches", POINTER(c_void_p)),
        ("arena", c_void_p),
        ("threads", c_int32),
        ("ranks", POINTER(LlmcRanks)),
        ("adapters", POINTER(c_void_p)),
    )


class LlmcChooseRows(Structure):
    """The rows to choose tokens of."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "vocabulary")),
        *((name, c_void_p) for name in ("logits", *CHOICE_INPUTS, "tokens", "scores")),
    )


ENGINE_STRUCTS: tuple[type[Structure], ...] = (LlmcStep, LlmcRanks, LlmcBindings, LlmcChooseRows)


def structs_text() -> str:
    """Return a line per struct: its size and the offsets of its fields."""
    return "".join(f"{struct.__name__} {sizeof(struct)} {_places(struct)}\n" for struct in ENGINE_STRUCTS)


def _places(struct: type[Structure]) -> str:
    return " ".join(f"{name}={getattr(struct, name).offset}" for name, *_ in struct._fields_)
