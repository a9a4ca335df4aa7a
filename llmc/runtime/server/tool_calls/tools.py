"""The functions that a request offers, and what their schemas say of single arguments."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Schema = Mapping[str, Any]
ANY_ARGUMENTS: Schema = {"type": "object"}
_ANYTHING: Schema = {}
_MOST_REFERENCES = 32
_PARTS = ("allOf", "anyOf", "oneOf")


@dataclass(frozen=True)
class Function:
    """A function that a call may name. name: what calls name it. parameters: the schema of its arguments, which are an
    object."""

    name: str
    parameters: Schema

    @cached_property
    def properties(self) -> dict[str, Any]:
        """The schemas of the arguments that the function names, in order."""
        merged: dict[str, Any] = {}
        for part in parts_of(self.parameters, self.parameters):
            properties = part.get("properties")
            if isinstance(properties, Mapping):
                merged |= {name: schema for name, schema in properties.items() if name not in merged}
        return merged

    @cached_property
    def names_arguments(self) -> bool:
        """Whether the function has no arguments but those that it names."""
        parts = list(parts_of(self.parameters, self.parameters))
        return any("properties" in part or part.get("additionalProperties") is False for part in parts)

    @cached_property
    def required(self) -> frozenset[str]:
        """The arguments that every call has."""
        names = resolved(self.parameters, self.parameters).get("required")
        return frozenset(name for name in self.properties if isinstance(names, list) and name in names)

    @cached_property
    def arguments_schema(self) -> Schema:
        """The schema for arguments as a JSON object."""
        return self.parameters if "type" in self.parameters else {**self.parameters, **ANY_ARGUMENTS}

    def values(self, name: str) -> list[Any]:
        """The only values that an argument may have; empty if the schema names none."""
        schema = resolved(self.properties.get(name), self.parameters)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        return values if isinstance(values, list) else []

    def argument_schema(self, name: str) -> Schema:
        """The schema of one argument, on its own."""
        shared = {key: self.parameters[key] for key in ("$defs", "definitions") if key in self.parameters}
        schema = self.properties.get(name)
        return {**shared, **schema} if isinstance(schema, Mapping) else shared

    def types(self, name: str) -> tuple[str, ...]:
        """The JSON types that an argument may have, in the schema's order; empty if the schema does not say."""
        return types_of(self.properties.get(name, {}), self.parameters)


Tools = Mapping[str, Function]


def tools_of(schemas: Mapping[str, Schema]) -> Tools:
    """The tools by name."""
    return {name: Function(name, schema) for name, schema in schemas.items()}


def resolved(schema: Any, root: Schema) -> Schema:
    """The schema that a reference within the root refers to; a dangling reference is not a constraint."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return _ANYTHING
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = _pointed(reference, root)
    return _ANYTHING


def parts_of(schema: Any, root: Schema) -> Iterator[Schema]:
    """The schema, and those that it is put together of, each once."""
    seen, left = set[int](), [resolved(schema, root)]
    while left:
        schema_part = left.pop(0)
        if id(schema_part) in seen:
            continue
        seen.add(id(schema_part))
        yield schema_part
        for key in _PARTS:
            parts = schema_part.get(key)
            left += [resolved(part, root) for part in parts] if isinstance(parts, list) else []


def types_of(schema: Any, root: Schema) -> tuple[str, ...]:
    """The JSON types that a value of the schema may have, in its order; empty if it does not say."""
    types: dict[str, None] = {}
    for part in parts_of(schema, root):
        declared = part.get("type")
        values = [part["const"]] if "const" in part else part.get("enum") if declared is None else None
        if isinstance(declared, str):
            types[declared] = None
        elif isinstance(declared, list):
            types |= dict.fromkeys(kind for kind in declared if isinstance(kind, str))
        elif isinstance(values, list):
            types |= dict.fromkeys(map(_type_of, values))
        if part.get("nullable") is True:
            types["null"] = None
    return tuple(types)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _pointed(reference: str, root: Schema) -> Any:
    if not reference.startswith("#"):
        return None
    target: Any = root
    for part in filter(None, reference[1:].split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, Mapping) else None
    return target
