"""The roles of a decoder graph's inputs and outputs: token ids, positions, a mask, the cache before and after."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from llmc.errors import CaptureError
from llmc.frontends.onnx.model import OnnxGraph, OnnxValue
from llmc.frontends.onnx.tensors import DTYPES


class Role(Enum):
    """The role of an input. SETTING: a number that selects an option; 0 is passed for all of them."""

    IDS = "token ids"
    POSITIONS = "positions"
    MASK = "mask"
    PAST = "cache"
    SETTING = "setting"


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of an ONNX model. ids: the name of the input of token ids. roles: the roles of all inputs
    by name. past: shapes of the cache's inputs, with nothing in it. logits: the name of the output. has_no_batch:
    whether ids are [tokens], and so all of it, as llmc exports."""

    ids: str
    roles: Mapping[str, Role]
    past: Mapping[str, tuple[int, ...]]
    logits: str
    has_no_batch: bool


_NAMES: Mapping[str, Role] = MappingProxyType(
    {
        "input_ids": Role.IDS,
        "decoder_input_ids": Role.IDS,
        "attention_mask": Role.MASK,
        "position_ids": Role.POSITIONS,
        "positions": Role.POSITIONS,
        "use_cache_branch": Role.SETTING,
        "num_logits_to_keep": Role.SETTING,
        "logits_to_keep": Role.SETTING,
    }
)
_FOREIGN: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "pixel_values": (
            "takes pictures: it is a vision model",
            "llmc builds decoders of text; name the .onnx file of the decoder, with input_ids",
        ),
        "input_features": ("takes sound", "llmc builds decoders of text"),
        "encoder_hidden_states": (
            "reads an encoder: it is the decoder of an encoder-decoder",
            "llmc compiles decoder-only language models",
        ),
        "inputs_embeds": (
            "takes embeddings in the place of token ids",
            "export the decoder with its embedding: an input input_ids",
        ),
        "token_type_ids": (
            "takes token types: it is an encoder",
            "llmc compiles decoder language models: ids to logits",
        ),
    }
)
_PAST = re.compile(r"(past|cache)", re.IGNORECASE)
# Cached values of layers other than attention.
_STATES = re.compile(r"(conv|ssm|recurrent)", re.IGNORECASE)
_INTEGERS = (6, 7)
_SEQUENCE_AXIS = 2


def read_interface(graph: OnnxGraph, file: Path, head_dim: int | None) -> Interface:
    """Read the roles of a decoder's inputs and outputs.

    head_dim: the cache's, if the file's shapes leave it open. Raises CaptureError for inputs that a
    decoder does not have.
    """
    roles: dict[str, Role] = {}
    past: dict[str, tuple[int, ...]] = {}
    for value in graph.inputs:
        if value.name in _FOREIGN:
            problem, fix = _FOREIGN[value.name]
            raise CaptureError(f"the model {problem} (input {value.name!r})", at=file, fix=fix)
        role = _NAMES.get(value.name) or _by_shape(value)
        if role is None:
            raise CaptureError(
                f"the model takes {value.name!r:.80}, {_shown(value)}, which no decoder of text does",
                at=file,
                fix="export it with inputs input_ids, and perhaps attention_mask, position_ids and past_key_values",
            )
        roles[value.name] = role
        if role is Role.PAST:
            past[value.name] = _empty(value, file, head_dim)
        if role is Role.MASK and (value.shape is None or len(value.shape) != 2):
            raise CaptureError(
                f"the input {value.name!r:.80} is a mask {_shown(value)}, which may hide anything",
                at=file,
                fix="export the model with an attention_mask [batch, tokens], or without one",
            )
    ids = [name for name, role in roles.items() if role is Role.IDS]
    if len(ids) != 1:
        raise CaptureError(
            f"the model has {len(ids)} inputs of token ids; its inputs are {', '.join(roles)[:200] or 'none'}",
            at=file,
            fix="export it with one input input_ids [batch, tokens] of whole numbers",
        )
    flat = next(input_.shape is not None and len(input_.shape) == 1 for input_ in graph.inputs if input_.name == ids[0])
    return Interface(ids[0], roles, past, _logits(graph, file, 2 if flat else 3), flat)


def _by_shape(value: OnnxValue) -> Role | None:
    axes = None if value.shape is None else len(value.shape)
    if axes == 4 and _PAST.search(value.name) and not _STATES.search(value.name):
        return Role.PAST
    if axes == 2 and value.type in _INTEGERS:
        return Role.POSITIONS if "position" in value.name else Role.IDS
    return None


def _empty(value: OnnxValue, file: Path, head_dim: int | None) -> tuple[int, ...]:
    """[1, heads, 0, head_dim] of the cache's shape."""
    shape = value.shape or ()
    tokens = shape[_SEQUENCE_AXIS]
    heads, width = shape[1], shape[3] if isinstance(shape[3], int) else head_dim
    if isinstance(tokens, int) and tokens > 0:
        raise CaptureError(
            f"the cache {value.name!r:.80} is {_shown(value)}, of a fixed length",
            at=file,
            fix="export the model with a cache that grows: past_key_values [batch, heads, past_length, head_dim]",
        )
    if not isinstance(heads, int) or not isinstance(width, int):
        raise CaptureError(
            f"the cache {value.name!r:.80} is {_shown(value)}, whose heads and their width it leaves open",
            at=file,
            fix="export the model with its heads and head_dim as numbers, or add genai_config.json to the directory",
        )
    return 1, heads, 0, width


def _logits(graph: OnnxGraph, file: Path, axes: int) -> str:
    names = [value.name for value in graph.outputs]
    candidates = [value for value in graph.outputs if value.name == "logits"] or list(graph.outputs[:1])
    value = candidates[0] if candidates else None
    is_float = value is not None and value.type in DTYPES and DTYPES[value.type].is_floating_point
    if value is None or not is_float or (value.shape is not None and len(value.shape) != axes):
        encoder = {"last_hidden_state", "pooler_output", "sentence_embedding", "start_logits"} & {*names}
        raise CaptureError(
            f"the model returns {', '.join(names)[:200] or 'nothing'}, no logits"
            + (": it is an encoder" if encoder else ""),
            at=file,
            fix="llmc compiles decoder language models: ids to logits [batch, tokens, vocabulary]",
        )
    if value.name in ("last_hidden_state", "hidden_states"):
        raise CaptureError(
            f"the model returns {value.name}, no logits: it is an encoder, or a decoder without its head",
            at=file,
            fix="llmc compiles decoder language models: ids to logits [batch, tokens, vocabulary]",
        )
    return value.name


def _shown(value: OnnxValue) -> str:
    sizes = "of any shape" if value.shape is None else str([size if size is not None else "?" for size in value.shape])
    return sizes[:120]
