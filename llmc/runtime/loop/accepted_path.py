"""The accepted drafts of a step, and moving their keys and values to the rows of a chain."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmc.runtime.loop.step import Ints
from llmc.runtime.requests.request import SampledRequest
from llmc.runtime.scheduling.step_plan import Chunk


@dataclass(slots=True)
class AcceptedPath:
    """The way through a chunk's drafts that a request's tokens take. first_row: the first row of logits after the
    request's last token.

    nodes: the accepted drafts.
    """

    chunk: Chunk
    request: SampledRequest
    first_row: int
    nodes: list[int] = field(default_factory=list)

    @property
    def row(self) -> int:
        """The row of logits for the next token."""
        return self.first_row + 1 + self.nodes[-1] if self.nodes else self.first_row

    def goes_on(self) -> bool:
        """Whether the token that the request has just got is a draft that follows; then it is the last node now."""
        chunk, nodes = self.chunk, self.nodes
        if self.request.finished:
            return False
        new_tokens = self.request.tokens[chunk.start + 1 + len(nodes) :]
        node = chunk.draft.child(nodes[-1] if nodes else None, new_tokens[0]) if len(new_tokens) == 1 else None
        if node is not None:
            nodes.append(node)
        return node is not None


def move_paths(
    paths: Sequence[AcceptedPath], block_size: int, groups: int, move_slots: Callable[[Ints, Ints, int], None]
) -> None:
    """Move the rows of accepted drafts that are not consecutive, all rows of a cache group at once."""
    for group in range(groups):
        moves = [move for path in paths for move in _moves(path, block_size, group)]
        if moves:
            sources, destinations = np.array(moves, np.int32).T.copy()
            move_slots(sources, destinations, group)


def _moves(path: AcceptedPath, block_size: int, group: int) -> Iterator[tuple[int, int]]:
    """Yield the source and destination slots of the path's rows."""
    first, standing = path.chunk.start + 1, path.request.standing
    for place, node in enumerate(path.nodes):
        if place != node:
            source, destination = (standing.slot(group, first + index, block_size) for index in (node, place))
            yield source, destination
