"""The table of all operators that are read, and what of a model is refused before anything is computed."""

from collections.abc import Iterable
from types import MappingProxyType

from llmc.errors import CaptureError
from llmc.frontends.onnx.call import Translations
from llmc.frontends.onnx.head_norms import HEAD_NORMS
from llmc.frontends.onnx.model import OnnxGraph, OnnxModel, OnnxNode
from llmc.frontends.onnx.translations.attention import ATTENTION
from llmc.frontends.onnx.translations.experts import EXPERTS
from llmc.frontends.onnx.translations.norms import NORMS
from llmc.frontends.onnx.translations.pointwise import POINTWISE
from llmc.frontends.onnx.translations.products import PRODUCTS
from llmc.frontends.onnx.translations.reductions import REDUCTIONS
from llmc.frontends.onnx.translations.rotary import ROTARY
from llmc.frontends.onnx.translations.shapes import SHAPES

OPERATORS: Translations = MappingProxyType(
    {**POINTWISE, **SHAPES, **REDUCTIONS, **PRODUCTS, **NORMS, **ROTARY, **ATTENTION, **EXPERTS, **HEAD_NORMS}
)
# The newest versions whose operators mean what the translations say.
NEWEST_OPSET, NEWEST_MICROSOFT = 25, 1
OLDEST_OPSET = 7
_IN_RUNS = frozenset({"If", "Constant"})

_QDQ = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QLinearMatMul"})
_STATES = frozenset({"LinearAttention", "CausalConvWithState", "GatedDeltaNet", "Conv", "Scan", "Loop", "LSTM", "GRU"})


def check_operators(model: OnnxModel, nodes: Iterable[OnnxNode]) -> None:
    """Raise CaptureError for versions and operators that are not read, before anything is computed."""
    newest = {"": NEWEST_OPSET, "com.microsoft": NEWEST_MICROSOFT}
    for domain, version in model.opsets.items():
        if version > newest.get(domain, version) or (not domain and version < OLDEST_OPSET):
            known = f"{OLDEST_OPSET} to {newest[domain]}" if not domain else f"up to {newest[domain]}"
            raise CaptureError(
                f"the model is of opset {version} of {domain or 'ai.onnx'}; llmc reads {known}",
                at=model.file,
                fix="export it with an older opset_version, or convert it: onnx.version_converter.convert_version",
            )
    for node in nodes:
        is_own = node.function in model.functions
        if (node.domain, node.op_type) not in OPERATORS and not is_own and node.op not in _IN_RUNS:
            raise unknown_operator(node)


def unknown_operator(node: OnnxNode) -> CaptureError:
    """The error for a node whose operator llmc does not translate."""
    fix = (
        "export the model without it, or build it from its safetensors; docs/onnx.md lists the operators that are read"
    )
    if node.op_type in _QDQ:
        fix = (
            "QDQ graphs quantize computed values: export the model without quantization and build it with "
            "--quantize int8, or with weights of MatMulNBits"
        )
    elif node.op_type in _STATES:
        fix = (
            "layers other than attention that keep a state are not read from ONNX: build the model from its safetensors"
        )
    return CaptureError(f"{node.label}: llmc does not support this operator", at=node.op, fix=fix)


_MOST_CALLS = 1 << 17
_MOST_DEPTH = 16


def check_expansion(model: OnnxModel, nodes: Iterable[OnnxNode]) -> None:
    """Raise CaptureError for functions that call themselves, and for more calls than a model has layers for: files can
    say 10¹² in a few bytes."""
    counted: dict[tuple[str, str, str], int] = {}

    def calls(nodes: Iterable[OnnxNode], within: tuple[tuple[str, str, str], ...]) -> int:
        return sum(1 + inner(node, within) for node in nodes)

    def inner(node: OnnxNode, within: tuple[tuple[str, str, str], ...]) -> int:
        branches = sum(
            calls(attribute.nodes, within) for attribute in node.attributes.values() if isinstance(attribute, OnnxGraph)
        )
        key = node.function
        function = model.functions.get(key)
        if function is None:
            return branches
        if key in within or len(within) >= _MOST_DEPTH:
            problem = "calls itself" if key in within else f"lies more than {_MOST_DEPTH} deep in others"
            raise _refused(model, f"the function {node.op:.80} {problem}")
        if key not in counted:
            counted[key] = calls(function.nodes, (*within, key))
        return branches + counted[key]

    total = calls(nodes, ())
    if total > _MOST_CALLS:
        raise _refused(model, f"its functions make {total} calls, more than {_MOST_CALLS}")


def _refused(model: OnnxModel, problem: str) -> CaptureError:
    return CaptureError(
        f"the model cannot be expanded: {problem}",
        at=model.file,
        fix="export the model again, with its functions inlined: onnx.inliner.inline_local_functions",
    )
