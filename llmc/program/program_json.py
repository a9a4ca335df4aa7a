"""program.json: a Program as text, with one buffer, weight or launch per line, and back."""

import json
from pathlib import Path

from llmc.errors import EngineFormatError
from llmc.files.typed_json import REBUILD, from_json, to_json
from llmc.program.program import Program


def program_to_json(program: Program) -> str:
    """The text of program.json; equal programs give equal texts."""
    fields = [f"{json.dumps(name)}: {_value_text(value)}" for name, value in to_json(program).items()]
    return "{\n" + ",\n".join(fields) + "\n}\n"


def program_from_json(text: str, at: Path) -> Program:
    """The program of such a text. at: the file it is from. Raises EngineFormatError for anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineFormatError(f"the program is not JSON: {error}", at=at, fix=REBUILD) from None
    return from_json(Program, content, f"{at}: program")


def _value_text(value: object) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n]"
    return json.dumps(value, ensure_ascii=False)
