"""The process of a replica: options as JSON in the first line of its standard input, which closes with its router."""

import json
import os
import signal
import sys
import threading

from llmc.errors import LlmcError
from llmc.runtime.server.early_end import end_on_sigterm
from llmc.runtime.server.options import ServeOptions, parsed
from llmc.runtime.server.serve import serve


def main() -> None:
    """Serve until SIGTERM, or until the router has ended."""
    end_on_sigterm()
    options = read_options(sys.stdin.readline())
    threading.Thread(target=_follow_router, daemon=True).start()
    try:
        serve(options, lambda address: None)
    except LlmcError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


def read_options(line: str) -> ServeOptions:
    values = {name: value for name, value in json.loads(line).items() if value is not None}
    return ServeOptions(**{name: parsed(ServeOptions, name, value) for name, value in values.items()})


def _follow_router() -> None:
    """The pipe ends when the router does, however it ended."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
