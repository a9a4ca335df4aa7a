"""The C interface of kernels/ for Python: structs as ctypes, functions' types, enumerators. The sources say them once.

api.h has the shared declarations; a kernel's struct and functions are in its own file. A struct's fields are passed by
name, and the generated C++ has them in the struct's order. Every library of kernels reports the compiler's layout
(`layout_source`), which is compared when it is opened, because a difference would corrupt memory.
"""

import ctypes
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.errors import ToolchainError

_COMMENT = re.compile(r" *//[^\n]*")
_STRUCT = re.compile(r"typedef struct \{([^}]*)\} (\w+);")
_ENUM = re.compile(r"enum \w* ?\{([^}]*)\};")
_FUNCTION = re.compile(r"^([\w ]+\*?) (llmc_\w+)\(([^)]*)\);", re.MULTILINE)
# The struct of a kernel's parameters, and the macro of kernel.h that defines the kernel.
_KERNEL = re.compile(r"void (llmc_\w+)\(LlmcPool\* pool, const (\w+)\* arguments\)")
_DEFINED = re.compile(r"^LLMC_KERNEL(S?)\((\w+), (\w+),", re.MULTILINE)
_SCALARS: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "void": None,
    "const char*": ctypes.c_char_p,
    "LlmcReadRow": ctypes.c_void_p,
    "LlmcExchange": ctypes.c_void_p,
}
# Fields that are one of an enum's names, and what those start with.
_ENUMERATED = {"activation": "LLMC_", "format": "LLMC_", "x_format": "LLMC_X_", "scale_type": "LLMC_SCALES_"}
_LAYOUTS = "llmc_layouts"


@dataclass(frozen=True)
class KernelApi:
    """The interface of C++ kernels. structs: ctypes classes, by name. declarations: in C, of those that kernels' own
    files declare. kernels: by function name, the struct that it takes. functions: their results and parameters, as
    ctypes. enumerators: the numbers of all enums' names."""

    structs: Mapping[str, type[ctypes.Structure]]
    declarations: Mapping[str, str]
    kernels: Mapping[str, str]
    functions: Mapping[str, tuple[Any, tuple[Any, ...]]]
    enumerators: Mapping[str, int]

    def fields(self, kernel: str) -> tuple[str, ...]:
        """The fields of the kernel's struct, in order."""
        return field_names(self.structs[self.kernels[kernel]])

    def declared(self, kernels: Iterable[str], readers: Iterable[str]) -> str:
        """C++ to put after api.h before calls of these kernels, with these functions that read rows."""
        called = sorted({kernel: self.kernels[kernel] for kernel in kernels}.items())
        structs = [self.declarations[name] for name in sorted({struct for _, struct in called})]
        functions = [f"void {name}(LlmcPool*, const {struct}*);" for name, struct in called]
        functions += [
            f"void {enumerator('read', name)}(const LlmcStoredRows*, int64_t, int64_t, int64_t, float*);"
            for name in sorted(set(readers))
        ]
        return "\n".join([*structs, 'extern "C" {', *functions, "}"])

    def arguments(self, kernel: str, values: Mapping[str, Any]) -> ctypes.Structure:
        """The kernel's struct; what is not given is zero. Rows are (address, stride), enumerators may be names."""
        struct = self.structs[self.kernels[kernel]]()
        known = self.fields(kernel)
        for name, value in values.items():
            assert name in known, f"{kernel} has no {name}: {', '.join(known)}"
            setattr(struct, name, self.enumerators[enumerator(name, value)] if isinstance(value, str) else value)
        return struct


def enumerator(field: str, value: str) -> str:
    """The name in C of an activation, format or type, or of the function that reads rows."""
    return f"llmc_rows_{value}" if field == "read" else _ENUMERATED[field] + value.upper()


def field_names(struct: type[ctypes.Structure]) -> tuple[str, ...]:
    """The names of a struct's fields, in order of declaration."""
    return tuple(name for name, *_ in struct._fields_)


def kernel_include_dir() -> Path:
    """The folder of api.h and of the headers that generated code includes."""
    return Path(__file__).parent / "kernels"


@functools.cache
def kernel_api() -> KernelApi:
    """The API that the sources declare."""
    header, *files = [_COMMENT.sub("", path.read_text(encoding="utf-8")) for path in _sources()]
    text = "\n".join([header, *files])
    structs: dict[str, type[ctypes.Structure]] = {}
    for body, name in _STRUCT.findall(text):
        fields = [field for line in body.split(";") if line.strip() for field in _fields(line.split(), structs)]
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    declarations = {struct[2]: struct[0] for file in files for struct in _STRUCT.finditer(file)}
    functions = {
        name: (_type(result.strip()), tuple(_type(_without_name(p)) for p in parameters.split(",") if p != "void"))
        for result, name, parameters in _FUNCTION.findall(header)
    }
    kernels = dict(_KERNEL.findall(text))
    for both, struct, name in _DEFINED.findall(text):
        kernels |= {f"llmc_{name}{suffix}": struct for suffix in (("_f32", "_bf16") if both else ("",))}
    functions |= dict.fromkeys(kernels, (None, (ctypes.c_void_p, ctypes.c_void_p)))
    enumerators = {
        name: int(number) for body in _ENUM.findall(text) for name, number in re.findall(r"(\w+) = (\d+)", body)
    }
    return KernelApi(structs, declarations, kernels, functions, enumerators)


def _sources() -> list[Path]:
    """api.h, then the kernels' own files."""
    sources = sorted(path for path in kernel_include_dir().iterdir() if path.suffix in (".h", ".cpp"))
    return sorted(sources, key=lambda path: path.name != "api.h")


def open_kernels(path: Path) -> ctypes.CDLL:
    """A library of kernels with its functions' types. Raises ToolchainError where it lays structs out differently."""
    library = ctypes.CDLL(str(path))
    expected = [number for _, number in _layouts()]
    actual = list((ctypes.c_int64 * len(expected)).in_dll(library, _LAYOUTS))
    if actual != expected:
        struct = next(name for (name, number), other in zip(_layouts(), actual, strict=True) if number != other)
        raise ToolchainError(f"the compiler lays kernels' structs out differently: {struct}", at=path)
    for name, (result, parameters) in kernel_api().functions.items():
        if hasattr(library, name):
            function = getattr(library, name)
            function.restype, function.argtypes = result, parameters
    return library


def layout_source() -> str:
    """C++ to compile among the kernels: sizes and offsets of all structs."""
    numbers = ", ".join(name for name, _ in _layouts())
    attribute = '__attribute__((visibility("default")))'
    declarations = "\n".join(kernel_api().declarations.values())
    return (
        f'#include <stddef.h>\n\n#include "api.h"\n\n{declarations}\n'
        f'extern "C" {attribute} const int64_t {_LAYOUTS}[];\nconst int64_t {_LAYOUTS}[] = {{{numbers}}};\n'
    )


def layout_assertion(struct: type[ctypes.Structure]) -> str:
    """C++ that does not compile unless the struct of that name is laid out as the ctypes class."""
    return "static_assert(" + " &&\n              ".join(f"{n} == {number}" for n, number in _layout(struct)) + ");"


def _layouts() -> list[tuple[str, int]]:
    return [pair for struct in kernel_api().structs.values() for pair in _layout(struct)]


def _layout(struct: type[ctypes.Structure]) -> list[tuple[str, int]]:
    """Return the size of a struct, then the offset of each field, each as a C++ expression and as a number."""
    name = struct.__name__
    places = [(f"offsetof({name}, {field})", getattr(struct, field).offset) for field in field_names(struct)]
    return [(f"sizeof({name})", ctypes.sizeof(struct)), *places]


def _fields(words: list[str], structs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Parse the fields of a declaration such as `const void* const* weights` or `int64_t tokens, in, out`."""
    if any("*" in word for word in words):
        return [(words[-1], ctypes.c_void_p)]
    kind, *names = words
    return [(name.rstrip(","), structs.get(kind) or _SCALARS[kind]) for name in names]


def _type(text: str) -> Any:
    return ctypes.c_void_p if text.endswith("*") and text not in _SCALARS else _SCALARS[text]


def _without_name(parameter: str) -> str:
    return parameter.strip().rpartition(" ")[0]
