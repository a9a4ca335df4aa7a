"""LLMC_DUMP=directory: the text of the graph after every pass, for `diff`, `less` and version control.

Nodes keep their names from pass to pass, so two neighbouring files differ only where that pass changed something.
"""

from itertools import count
from pathlib import Path

from llmc.files.storage_error import storage_error
from llmc.graph.model_graph import ModelGraph
from llmc.graph.pass_record import PassRecord
from llmc.graph.render import render
from llmc.passes.runner import Observer
from llmc.settings import settings

_OURS = "[0-9][0-9]-*.txt"


class GraphDump:
    """An observer of run_pipeline that writes NN-pass.txt after each pass; 00-captured.txt is the graph before the
    first pass.

    Files of an earlier run are removed first. Raises LlmcError if the directory is not writable.
    """

    def __init__(self, directory: Path, captured: ModelGraph) -> None:
        self._directory = directory
        self._numbers = count()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for old in directory.glob(_OURS):
                old.unlink()
        except OSError as error:
            raise storage_error(error, directory) from None
        self._write("captured", captured)

    def __call__(self, record: PassRecord, graph: ModelGraph) -> None:
        """Write the graph that came out of a pass."""
        self._write(record.name, graph)

    def _write(self, name: str, graph: ModelGraph) -> None:
        file = self._directory / f"{next(self._numbers):02d}-{name}.txt"
        try:
            file.write_text(render(graph), encoding="utf-8")
        except OSError as error:
            raise storage_error(error, file) from None


def dumped(captured: ModelGraph, *observers: Observer) -> Observer:
    """Return an observer that notifies all of these, and that dumps if LLMC_DUMP is set."""
    directory = settings().dump
    dumps: tuple[Observer, ...] = () if directory is None else (GraphDump(directory, captured),)

    def observe(record: PassRecord, graph: ModelGraph) -> None:
        for observer in (*observers, *dumps):
            observer(record, graph)

    return observe
