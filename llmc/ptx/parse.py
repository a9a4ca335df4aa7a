"""Read PTX text into a Module. Nothing of it is executed here, and opcodes are not judged."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from llmc.ptx.errors import PtxError
from llmc.ptx.module import REGISTER_BYTES, Instruction, Kernel, Module, Parameter, Register, SourceLine, Variable
from llmc.ptx.operands import Scope, parse_guard, parse_operands
from llmc.ptx.statements import REBUILD, Kind, Statement, cut_off, statements

_ENTRY = re.compile(r"(?:\.(?:visible|weak)\s+)?\.entry\s+([\w$]+)\s*\(([^)]*)\)(.*)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\b[^,]*?\s)?([\w$]+)(?:\[(\d+)\])?$")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_DECLARED = re.compile(r"\s*([\w$%]+)(?:<(\d{1,6})>)?\s*")
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"([\w$]+)\s*(\[\d*\])?\s*(?:=\s*(.*))?",
    re.DOTALL,
)
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+(.*)")
_INLINED = re.compile(r"inlined_at\s+(\d+)\s+(\d+)")
_BRANCH_TARGETS = re.compile(r"\.branchtargets\s+(.*)", re.DOTALL)
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
# Maximum size of a variable; a larger one means a damaged file.
_MOST_BYTES = 1 << 24
_SIZES = re.compile(r"\.(reqntid|reqnctapercluster)\s+(\d+(?:\s*,\s*\d+)*)")


def parse_module(text: str, name: str) -> Module:
    """The module that PTX text is.

    Args:
        text: PTX of any version.
        name: the name of the file, for errors and findings.

    Raises:
        PtxError: it is not PTX, is truncated, or names an undeclared register, label or file.
    """
    version, target = _header(text, name)
    files: dict[str, str] = dict(_FILE.findall(text))
    parsed = list(statements(text, name))
    shared = {v.name: v for v in _module_variables(parsed, name)}
    kernels = tuple(_kernels(parsed, files, shared, name))
    if not kernels:
        raise cut_off(name, len(text.splitlines()), "it has no kernel")
    return Module(name, version, target, kernels)


def _header(text: str, name: str) -> tuple[tuple[int, int], str]:
    version = re.search(r"^\s*\.version\s+(\d+)\.(\d+)", text, re.MULTILINE)
    target = re.search(r"^\s*\.target\s+(\w+)", text, re.MULTILINE)
    if version is None or target is None:
        missing = ".version" if version is None else ".target"
        raise PtxError(f"the file is not PTX: it has no {missing}", at=name, fix=REBUILD)
    return (int(version[1]), int(version[2])), target[1]


def _module_variables(statements: list[Statement], name: str) -> Iterator[Variable]:
    depth = 0
    for statement in statements:
        depth += {Kind.OPEN: 1, Kind.CLOSE: -1}.get(statement.kind, 0)
        if depth == 0 and statement.kind is Kind.DIRECTIVE:
            variable = _variable(statement, name)
            if variable is not None:
                yield variable


def _kernels(
    statements: list[Statement], files: Mapping[str, str], shared: Mapping[str, Variable], name: str
) -> Iterator[Kernel]:
    depth, header, body = 0, None, list[Statement]()
    for statement in statements:
        if depth == 0 and statement.kind is Kind.DIRECTIVE and ".entry" in statement.text:
            header, body = statement, []
        depth += {Kind.OPEN: 1, Kind.CLOSE: -1}.get(statement.kind, 0)
        if header is not None:
            body.append(statement)
            if depth == 0 and statement.kind is Kind.CLOSE:
                yield _KernelReader(files, dict(shared), name).read(header, body[1:])
                header = None


@dataclass
class _KernelReader:
    """Reads one entry."""

    files: Mapping[str, str]
    variables: dict[str, Variable]
    name: str
    registers: list[Register] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branch_tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    newest_label: str = ""
    scopes: list[Scope] = field(default_factory=list)
    source: SourceLine | None = None

    def read(self, header: Statement, body: list[Statement]) -> Kernel:
        match = _ENTRY.search(header.text)
        if match is None:
            raise PtxError(f"the entry {header.text[:60]!r} cannot be read", at=self.at(header.line), fix=REBUILD)
        labels = self._labels_by_scope(body)
        opened = 0
        for statement in body:
            if statement.kind is Kind.OPEN:
                outer = self.scopes[-1] if self.scopes else None
                self.scopes.append(Scope(opened, outer, labels[opened]))
                opened += 1
            elif statement.kind is Kind.CLOSE:
                self.scopes.pop()
            elif statement.kind is Kind.LABEL:
                self.newest_label = self.scopes[-1].label(statement.text)
                self.labels[self.newest_label] = len(self.instructions)
            elif statement.kind is Kind.DIRECTIVE:
                self._directive(statement)
            else:
                self._instruction(statement)
        sizes = {name: tuple(int(size) for size in extents.split(",")) for name, extents in _SIZES.findall(match[3])}
        return Kernel(
            match[1],
            tuple(_parameters(match[2], self.at(header.line))),
            tuple(self.instructions),
            self.labels,
            self.branch_tables,
            tuple(self.registers),
            self.variables,
            sizes.get("reqntid", ()),
            sizes.get("reqnctapercluster", ()),
        )

    def at(self, line: int) -> str:
        return f"{self.name}:{line}"

    def _labels_by_scope(self, body: list[Statement]) -> list[frozenset[str]]:
        """The labels of each scope, in the order in which scopes open: a branch may go to one that comes later."""
        labels, stack = list[set[str]](), list[int]()
        for statement in body:
            if statement.kind is Kind.OPEN:
                stack.append(len(labels))
                labels.append(set())
            elif statement.kind is Kind.CLOSE:
                stack.pop()
            elif statement.kind is Kind.LABEL:
                labels[stack[-1]].add(statement.text)
        return [frozenset(names) for names in labels]

    def _directive(self, statement: Statement) -> None:
        if re.match(r"\.loc\b", statement.text):
            self.source = self._location(statement)
        elif match := _REGISTERS.match(statement.text):
            self._declare(match[1], match[2], statement)
        elif match := _BRANCH_TARGETS.match(statement.text):
            targets = (self.scopes[-1].label(name.strip()) for name in match[1].split(","))
            self.branch_tables[self.newest_label] = tuple(targets)
        else:
            variable = _variable(statement, self.name)
            if variable is not None:
                self.variables[variable.name] = variable

    def _location(self, statement: Statement) -> SourceLine:
        match = _LOCATION.match(statement.text)
        if match is None:
            raise PtxError(f"{statement.text!r} is not a source line", at=self.at(statement.line), fix=REBUILD)
        inlined = _INLINED.search(match[3])
        caller = None if inlined is None else SourceLine(self._file(inlined[1], statement), int(inlined[2]))
        return SourceLine(self._file(match[1], statement), int(match[2]), caller)

    def _file(self, number: str, statement: Statement) -> str:
        if number not in self.files:
            raise PtxError(f"source file {number} is not declared", at=self.at(statement.line), fix=REBUILD)
        return self.files[number]

    def _declare(self, kind: str, names: str, statement: Statement) -> None:
        if kind not in REGISTER_BYTES:
            raise PtxError(f"registers of the type .{kind} are unknown", at=self.at(statement.line), fix=REBUILD)
        for given in names.split(","):
            match = _DECLARED.fullmatch(given)
            if match is None:
                raise PtxError(f"{given.strip()!r} is not a register", at=self.at(statement.line), fix=REBUILD)
            stem, count = match.groups()
            declared = [stem] if count is None else [f"{stem}{i}" for i in range(int(count))]
            for name in declared:
                register = Register(name, len(self.registers), REGISTER_BYTES[kind], kind == "pred")
                self.registers.append(register)
                self.scopes[-1].registers[name] = register

    def _instruction(self, statement: Statement) -> None:
        at = self.at(statement.line)
        guard, rest = parse_guard(statement.text, self.scopes[-1], at)
        opcode, _, operands = rest.partition(" ")
        parsed = parse_operands(operands, self.scopes[-1], at)
        self.instructions.append(Instruction(opcode, parsed, guard, statement.line, self.source))


def _parameters(text: str, at: str) -> Iterator[Parameter]:
    offset = 0
    for declared in filter(None, (" ".join(parameter.split()) for parameter in text.split(","))):
        match = _PARAMETER.match(declared)
        if match is None or match[1] not in REGISTER_BYTES:
            raise PtxError(f"the parameter {declared!r} cannot be read", at=at, fix=REBUILD)
        count = int(match[3] or 1)
        nbytes = REGISTER_BYTES[match[1]] * count
        yield Parameter(match[2], match[1], count, offset, nbytes)
        offset += -(-nbytes // 8) * 8


def _variable(statement: Statement, name: str) -> Variable | None:
    match = _VARIABLE.match(statement.text)
    if match is None:
        return None
    space, alignment, kind, variable, dimension, content = match.groups()
    if kind not in REGISTER_BYTES:
        raise PtxError(f"variables of the type .{kind} are unknown", at=f"{name}:{statement.line}", fix=REBUILD)
    size = REGISTER_BYTES[kind]
    count = int(dimension.strip("[]") or 0) if dimension else 1
    if count * size > _MOST_BYTES:
        raise PtxError(f"{variable} has {count * size} bytes", at=f"{name}:{statement.line}", fix=REBUILD)
    values = [int(number, 0) for number in re.findall(r"-?\w+", content or "")]
    data = b"".join((value % (1 << 8 * size)).to_bytes(size, "little") for value in values).ljust(count * size, b"\0")
    return Variable(
        variable, space, count * size, int(alignment or size), data if space in ("global", "const") else b""
    )
