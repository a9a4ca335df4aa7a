"""A process of its own, beside a recording driver: load a binary and launch it, as the executor does.

One argument, a JSON object: directory, binary (fields of DeviceBinary), grid, stream, values (hexadecimal, eight bytes
each). Prints the LlmcError's text if it is refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llmc.errors import LlmcError
from llmc.program import DeviceBinary
from llmc.runtime.device.arguments import PackedArguments
from llmc.runtime.executors.cuda_driver import load_kernel


def main() -> None:
    request = json.loads(sys.argv[1])
    try:
        kernel = load_kernel(DeviceBinary(**request["binary"]), Path(request["directory"]))
        arguments = PackedArguments([bytes.fromhex(value) for value in request["values"]])
        x, y, z = request["grid"]
        kernel.launch((x, y, z), request["stream"], arguments.address)
    except LlmcError as error:
        print(error)


if __name__ == "__main__":
    main()
