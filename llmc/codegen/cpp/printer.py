"""Print a loop as a C++ function that vectorizes over columns and runs rows in parallel."""

import math
from collections.abc import Iterator

from llmc.codegen.kernel_ir import Apply, Constant, Load, Loop, Reduce, Store
from llmc.graph.pointwise import Kind

# A parallel region costs some microseconds: a thread takes at least this many elements at a time.
_GRAIN = 16384

_ELEMENTS = {"F32": "float", "BF16": "loops::bf16", "I32": "int32_t", "U8": "uint8_t"}
_KINDS = {Kind.FLOAT: "float", Kind.INT: "int32_t", Kind.BOOL: "bool"}
_EXPRESSIONS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "floor_div": "loops::floor_div({}, {})",
    "remainder": "loops::remainder({}, {})",
    "pow": "powf({}, {})",
    "maximum": "loops::max({}, {})",
    "minimum": "loops::min({}, {})",
    "lt": "{} < {}",
    "le": "{} <= {}",
    "gt": "{} > {}",
    "ge": "{} >= {}",
    "eq": "{} == {}",
    "ne": "{} != {}",
    "and": "{} & {}",
    "or": "{} | {}",
    "not": "!{}",
    "where": "{} ? {} : {}",
    "neg": "-{}",
    "abs": "fabsf({})",
    "square": "{0} * {0}",
    "reciprocal": "1.0f / {}",
    "sqrt": "sqrtf({})",
    "rsqrt": "1.0f / sqrtf({})",
    "log": "logf({})",
    "sin": "sinf({})",
    "cos": "cosf({})",
    "floor": "floorf({})",
    "ceil": "ceilf({})",
    "relu": "loops::max({}, 0.0f)",
    "to_float": "static_cast<float>({})",
    "to_int": "static_cast<int32_t>({})",
    "to_bool": "{} != 0",
    **{name: f"loops::{name}({{}})" for name in ("exp", "erf", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh")},
    **{name: f"loops::{name}({{}})" for name in ("softplus", "round_bf16")},
}
_REDUCTIONS = {
    "sum": ("0.0f", "+", "{0} += {1};"),
    "mean": ("0.0f", "+", "{0} += {1};"),
    "max": ("-INFINITY", "max", "{0} = loops::max({0}, {1});"),
    "min": ("INFINITY", "min", "{0} = loops::min({0}, {1});"),
}


def print_loop(name: str, loop: Loop, comment: str) -> str:
    """The function `static void name(LlmcPool* pool, int64_t rows, p0, p1, …)`.

    Pointers are to each parameter's first element; the comment goes above it, a line each.
    """
    pointers = [f"{pointer(p.dtype, p.written)} __restrict p{i}" for i, p in enumerate(loop.parameters)]
    lines = [f"// {line}" for line in comment.splitlines()]
    lines += wrapped(["LlmcPool* pool", "int64_t rows", *pointers], f"static void {name}(", ") {")
    grain = max(1, _GRAIN // math.prod(loop.dims))
    lines.append(f"  parallel_ranges(pool, rows, {grain}, [=](int64_t begin, int64_t end, void*) LLMC_ONE_COPY {{")
    lines.append("    for (int64_t row = begin; row < end; row++)")
    indent = "      "
    for axis, size in enumerate(loop.dims[:-1]):
        lines.append(f"{indent}for (int64_t i{axis} = 0; i{axis} < {size}; i{axis}++)")
        indent += "  "
    lines[-1] += " {"
    lines += [indent + line for line in _body(loop)]
    lines += [indent[:-2] + "}", "  });", "}"]
    return "\n".join(lines) + "\n"


def pointer(dtype: str, written: bool) -> str:
    """The C++ pointer type to elements of a safetensors dtype."""
    return f"{'' if written else 'const '}{_ELEMENTS[dtype]}*"


def wrapped(parts: list[str], opening: str, closing: str) -> Iterator[str]:
    """Comma-separated parts in lines of at most 118 columns, those after the first indented under it."""
    line = opening
    for i, part in enumerate(parts):
        piece = part + ("," if i + 1 < len(parts) else closing)
        if i > 0 and len(line) + 1 + len(piece) > 118:
            yield line
            line = " " * len(opening) + piece
        else:
            line += (" " if i > 0 else "") + piece
    yield line


def _body(loop: Loop) -> Iterator[str]:
    last = max(loop.phases, default=0)
    for phase in range(last + 1):
        for i, s in enumerate(loop.statements):
            if isinstance(s, Load | Apply) and loop.phases[i] == phase and not loop.per_column[i]:
                yield _assignment(loop, i)
        yield from _sweep(loop, phase, stores=phase == last)
    for i, s in enumerate(loop.statements):
        if isinstance(s, Store) and not loop.per_column[i]:
            yield _store(loop, s)


def _sweep(loop: Loop, phase: int, stores: bool) -> Iterator[str]:
    """Yield the code of one pass over the columns: the reductions that the next phase needs, or in the last phase the
    stores."""
    reductions = {i: s for i, s in enumerate(loop.statements) if isinstance(s, Reduce) and loop.phases[i] == phase + 1}
    written = {i: s for i, s in enumerate(loop.statements) if isinstance(s, Store) and loop.per_column[i] and stores}
    if not reductions and not written:
        return
    clauses = ""
    for i, s in reductions.items():
        start, operator, _ = _REDUCTIONS[s.reduction]
        yield f"float v{i} = {start};"
        clauses += f" reduction({operator} : v{i})"
    yield f"#pragma omp simd{clauses}"
    yield f"for (int64_t c = 0; c < {loop.dims[-1]}; c++) {{"
    for i in loop.needed([*reductions, *written]):
        if i in reductions:
            s = reductions[i]
            yield "  " + _REDUCTIONS[s.reduction][2].format(f"v{i}", _operand(loop, s.operand))
        elif i in written:
            yield "  " + _store(loop, written[i])
        elif loop.per_column[i]:
            yield "  " + _assignment(loop, i)
    yield "}"
    for i, s in reductions.items():
        if s.reduction == "mean":
            yield f"v{i} /= {float(loop.dims[-1])}f;"


def _assignment(loop: Loop, index: int) -> str:
    s = loop.statements[index]
    if isinstance(s, Load):
        return f"const {_KINDS[s.kind]} v{index} = loops::load({_element(loop, s.parameter)});"
    assert isinstance(s, Apply)
    expression = _EXPRESSIONS[s.function].format(*(_operand(loop, o) for o in s.operands))
    return f"const {_KINDS[s.kind]} v{index} = {expression};"


def _store(loop: Loop, s: Store) -> str:
    return f"loops::store({_element(loop, s.parameter)}, {_operand(loop, s.operand)});"


def _operand(loop: Loop, index: int) -> str:
    s = loop.statements[index]
    return _literal(s) if isinstance(s, Constant) else f"v{index}"


def _literal(constant: Constant) -> str:
    if constant.kind is Kind.BOOL:
        return "true" if constant.value else "false"
    if constant.kind is Kind.INT:
        return str(int(constant.value)) if constant.value >= 0 else f"({int(constant.value)})"
    value = float(constant.value)
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    return f"{value!r}f" if value >= 0 else f"({value!r}f)"


def _element(loop: Loop, parameter: int) -> str:
    names = ["row", *(f"i{axis}" for axis in range(len(loop.dims) - 1)), "c"]
    terms = [
        name if stride == 1 else f"{name} * {stride}"
        for name, stride in zip(names, loop.parameters[parameter].strides, strict=True)
        if stride != 0
    ]
    return f"p{parameter}[{' + '.join(terms) or '0'}]"
